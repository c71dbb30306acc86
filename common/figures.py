"""What figures and HTML pages share: the style, thumbnails, and saving a figure whole."""

import base64
import io
import os
import pathlib

from PIL import Image

os.environ.setdefault("MPLBACKEND", "Agg")  # figures go to files, whatever screen there is
THUMBNAIL = 256  # longest side of a picture on the page


def save_figure(figure, path: pathlib.Path) -> None:
    """Written beside its place and renamed: a viewer never sees half a picture."""
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
    """The picture as a data URI, reduced when it is large."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
