"""Helpers for figures and HTML pages: saving figures, the page style, and thumbnails."""

import base64
import io
import os
import pathlib

from PIL import Image

os.environ.setdefault("MPLBACKEND", "Agg")  # figures go to files, so Matplotlib needs no display
THUMBNAIL = 256  # maximum length of an image's longer side on a page, in pixels


def save_figure(figure, path: pathlib.Path) -> None:
    """Save `figure` as a PNG file under a temporary name, then rename it, so that `path` is never incomplete."""
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path.with_suffix(".partial"), format="png", dpi=110)
    finally:
        plt.close(figure)
    path.with_suffix(".partial").rename(path)


# --- page -------------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 66em; padding: 0 1em; color: #222; }
article { display: flex; flex-wrap: wrap; gap: 1.2em; border-top: 1px solid #ddd; padding: 1.2em 0; }
figure { margin: 0; flex: 0 0 15em; } figure img { width: 100%; image-rendering: pixelated; border: 1px solid #ccc; }
figcaption b { display: block; margin-top: .4em; } section { flex: 1 1 30em; min-width: 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25em .6em; vertical-align: top; }
th.number, td.number { width: 1%; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: .9em; }
tr.right { background: #e5f4e3; } tr.wrong { background: #fbeaea; } tr.near { background: #fdf6e0; }
"""


def thumbnail(image: Image.Image) -> str:
    """Return `image` as a PNG data URI, scaled down to at most `THUMBNAIL` pixels per side."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
