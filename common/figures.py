"""Helpers for figures and HTML pages: saving figures, filling the page template, and thumbnails."""

import base64
import io
import os
import pathlib
from typing import Any

import jinja2
from PIL import Image

from common.files import atomic_write, partial_path

os.environ["MPLBACKEND"] = "Agg"  # figures go to files: no display and no other backend is needed
PAGE = pathlib.Path(__file__).parent / "page.html.j2"
THUMBNAIL = 256  # maximum length of an image's longer side on a page, in pixels


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Save `figure` as a PNG file under a temporary name, then rename it, so that `path` is never incomplete."""
    import matplotlib.pyplot as plt

    try:
        figure.savefig(partial_path(path), format="png", dpi=110)
    finally:
        plt.close(figure)
    partial_path(path).rename(path)


def save_page(path: pathlib.Path, template: pathlib.Path = PAGE, **values: Any) -> None:
    """Write a page, by default one of questions and completions. The template says which `values` it shows."""
    folders = jinja2.FileSystemLoader([template.parent, PAGE.parent])
    environment = jinja2.Environment(loader=folders, autoescape=True, trim_blocks=True)
    atomic_write(path, environment.get_template(template.name).render(values))


def thumbnail(image: Image.Image, side: int = THUMBNAIL) -> str:
    """Return `image` as a data URI, scaled down to at most `side` pixels per side."""
    small = image.copy()
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=90)  # a tenth of a PNG
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
