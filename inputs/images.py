"""Check, decode and resize images. Each image is resized only once, in this module; no later processor resizes it.

`check_image` checks an image when its row is loaded, and `fit_image` decodes it when the row is used. This way, twenty
thousand rows are checked in seconds, and no image stays in memory.
"""

import contextlib
import io
import math
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError

from common.records import Cell, ImageSource

UNREADABLE: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, TypeError, EOFError, RuntimeError)
UNREADABLE += (struct.error, AssertionError, LookupError, ArithmeticError, Image.DecompressionBombError)
UNREADABLE += (zipfile.BadZipFile, zlib.error)
ORIENTATION = 0x0112  # EXIF tag; the values 5 to 8 swap width and height
TURNS = {  # orientation -> how to turn the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow starts other programs to decode some other formats
MAX_MEGAPIXELS = 64.0  # larger images are refused before they are decoded; replaces Pillow's own limit
Image.MAX_IMAGE_PIXELS = None
BAND = 256  # number of pixel rows that are rescaled at a time


class TooLarge(ValueError):
    """The image has more than `MAX_MEGAPIXELS`."""


def decode_image(source: ImageSource) -> Image.Image:
    """Decode `source` as upright 8-bit RGB.

    The EXIF orientation is applied, and transparent pixels are blended with white. 16-bit and float scans are rescaled
    so that the darkest value becomes 0 and the brightest becomes 255; clipping them to 8 bits would turn them white.
    Raises ValueError for an image that cannot be used, and FileNotFoundError when the file does not exist.
    """
    with _readable():
        image = _open(source)
        image.load()
        # `ImageOps.exif_transpose` would also write the EXIF data again, which fails if one of its tags is damaged.
        turn = TURNS.get(image.getexif().get(ORIENTATION))
        image = image if turn is None else image.transpose(turn)
        if image.mode in ("F", "I") or image.mode.startswith("I;"):
            image = _rescale(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        image.info.clear()  # copies would keep the orientation, and be turned once more
        return image


def _rescale(image: Image.Image) -> Image.Image:
    """Rescale a 16-bit, 32-bit or float image to 8 bits, a band of rows at a time to save memory."""
    values = np.asarray(image)
    finite = np.isfinite(values)
    low, high = 0.0, 0.0
    if finite.any():
        low, high = float(values[finite].min()), float(values[finite].max())
    scaled = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, len(values), BAND):
        rows = slice(start, start + BAND)
        band = np.where(finite[rows], values[rows].astype(np.float64), low) - low
        scaled[rows] = (band * (255 / max(high - low, 1e-12))).round()
    return Image.fromarray(scaled)


def check_image(source: ImageSource, decode: bool = True) -> tuple[int, int]:
    """Check that an image is intact and return its upright (height, width). Raises the same errors as `decode_image`.

    JPEG is decoded at an eighth of its size, but every byte is read. Other formats are decoded in full. Without
    `decode`, only the header is read.
    """
    with _readable():
        image = _open(source)
        width, height = image.size
        if decode:
            image.draft("L", (1, 1))  # only JPEG supports drafts; other formats ignore this
            image.load()
        is_turned = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return (width, height) if is_turned else (height, width)


def read_source(source: ImageSource) -> bytes | str | pathlib.Path | Image.Image:
    """Convert `source` to a path, encoded bytes or an image. Only table cells and files in a ZIP are read here.

    Raises ValueError when `source` has neither bytes nor a path, or cannot be read from its ZIP.
    """
    if isinstance(source, Cell):
        source = source.read()
    if isinstance(source, dict):
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if source is None:
        raise ValueError("it has neither bytes nor a path")
    with _readable():
        return source.read_bytes() if isinstance(source, zipfile.Path) else source


def file_version(source: ImageSource) -> int | str | None:
    """Return the modification time of the file that holds an image, or the name of its table; None without a file."""
    if isinstance(source, Cell):
        return str(source.table.cache_files)
    if isinstance(source, zipfile.Path):
        source = source.root.filename
    return os.stat(source).st_mtime_ns if isinstance(source, str | pathlib.Path) and os.path.exists(source) else None


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn decoders' errors about broken images into ValueError, but let FileNotFoundError and TooLarge through."""
    try:
        yield
    except (FileNotFoundError, TooLarge):
        raise
    except UNREADABLE as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is none of {', '.join(FORMATS)}" if unknown else str(error)[:80]
        raise ValueError(f"not a readable image ({reason})") from None


def _open(source: ImageSource) -> Image.Image:
    content = read_source(source)
    if isinstance(content, Image.Image):
        return content
    if isinstance(content, str | pathlib.Path) and pathlib.Path(content).exists() and not os.path.isfile(content):
        raise ValueError("it is not a file")  # reading a pipe could take forever
    image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)
    if image.width * image.height > MAX_MEGAPIXELS * 1e6:
        limit = f"more than {MAX_MEGAPIXELS:g} megapixels"
        raise TooLarge(f"the image is {image.width}x{image.height}, which is {limit}: scale it down")
    return image


def fitted_size(height: int, width: int, min_pixels: int, max_pixels: int, factor: int = 28) -> tuple[int, int]:
    """Return the (height, width) in pixels to which an image is resized.

    Both are multiples of `factor`. Height · width is within the pixel limits, and the aspect ratio is approximately
    kept. The result is the size that Qwen2-VL's own resizing chooses, if that size is within the limits. Raises
    ValueError when one side is more than 200 times the other, because the models reject such images.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"the image is {width}x{height}: one side is more than 200 times the other")
    sides = height, width
    h, w = (max(factor, round(side / factor) * factor) for side in sides)
    if h * w > max_pixels:
        shrink = math.sqrt(math.prod(sides) / max_pixels)
        h, w = (max(factor, math.floor(side / shrink / factor) * factor) for side in sides)
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / math.prod(sides))
        h, w = (math.ceil(side * grow / factor) * factor for side in sides)
    # It is not always possible to meet both limits, for example when a thin image's short side is already `factor`. In
    # that case the upper limit takes precedence.
    h = max(factor, min(h, max_pixels // w // factor * factor))
    w = max(factor, min(w, max_pixels // h // factor * factor))
    return h, w


def fit_image(source: ImageSource, fit: Callable[[int, int], tuple[int, int]]) -> Image.Image:
    """Decode `source` and resize the image to the (height, width) that `fit` returns, with bicubic interpolation.

    Raises the same errors as `decode_image` and `fit`.
    """
    image = decode_image(source)
    h, w = fit(image.height, image.width)
    return image if image.size == (w, h) else image.resize((w, h), Image.Resampling.BICUBIC)
