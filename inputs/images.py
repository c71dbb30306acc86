"""Check, decode and resize images. Each image is resized only once, in this module; no later processor resizes it.

`check_image` checks an image when its row is loaded, and `fit_image` decodes it when the row is used. This way, twenty
thousand rows are checked in seconds, and no image stays in memory.
"""

import contextlib
import io
import math
import pathlib
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from common.records import Cell, ImageSource

DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, RuntimeError, Image.DecompressionBombError)
UNREADABLE = (*DECODER_ERRORS, zipfile.BadZipFile, zlib.error)
ORIENTATION = 0x0112  # EXIF tag; values of 5 and above swap width and height


def decode_image(source: ImageSource) -> Image.Image:
    """Decode `source` as upright 8-bit RGB.

    The EXIF orientation is applied, and transparent pixels are blended with white. 16-bit and float scans are rescaled
    so that the darkest value becomes 0 and the brightest becomes 255; clipping them to 8 bits would turn them white.
    Raises ValueError when the image is damaged or incomplete, and FileNotFoundError when the file does not exist.
    """
    with _readable():
        image = ImageOps.exif_transpose(_open(source))
        image.load()
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        values = np.asarray(image, dtype=np.float64)
        finite = np.isfinite(values)
        low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
        scaled = (np.where(finite, values, low) - low) * (255 / max(high - low, 1e-12))
        image = Image.fromarray(scaled.round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def check_image(source: ImageSource) -> tuple[int, int]:
    """Check that an image is intact and return its upright (height, width). Raises the same errors as `decode_image`.

    This is faster than full decoding. For PNG, the checksums are verified. JPEG is decoded at an eighth of its size,
    which still reads every byte. Other formats are decoded in full.
    """
    with _readable():
        image = _open(source)
        width, height = image.size
        swapped = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= 5
        if image.format == "PNG":
            image.verify()
        else:
            image.draft("L", (1, 1))  # only JPEG supports drafts; other formats ignore this
            image.load()
    return (width, height) if swapped else (height, width)


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


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn any error that a decoder raises for a broken image into ValueError. FileNotFoundError passes through."""
    try:
        yield
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "Pillow does not recognise the format" if unknown else str(error)[:80]
        raise ValueError(f"not a readable image ({reason})") from None


def _open(source: ImageSource) -> Image.Image:
    content = read_source(source)
    if isinstance(content, Image.Image):
        return content
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)


def fitted_size(
    height: int, width: int, min_pixels: int, max_pixels: int, factor: int = 28, max_side: int = 0
) -> tuple[int, int]:
    """Return the (height, width) in pixels to which an image is resized.

    Both are multiples of `factor`. Height · width is within the pixel limits, and the aspect ratio is approximately
    kept. `max_side` limits the longer side; 0 means no limit. The result is the size that Qwen2-VL's own resizing
    chooses, if that size is within the limits. Raises ValueError when one side is more than 200 times the other,
    because the models reject such images.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"the image is {width}x{height}: one side is more than 200 times the other")
    if max_side:
        shrink = min(1.0, max_side / max(height, width))
        height, width = height * shrink, width * shrink
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * grow / factor) * factor for side in (height, width))
    # It is not always possible to meet all limits, for example when a thin image's short side is already `factor`. In
    # that case the upper limits take precedence.
    if max_side:
        h, w = (max(factor, min(side, max_side // factor * factor)) for side in (h, w))
    h = max(factor, min(h, max_pixels // w // factor * factor))
    w = max(factor, min(w, max_pixels // h // factor * factor))
    return h, w


def fit_image(source: ImageSource, *limits: int) -> Image.Image:
    """Decode `source` and resize the image to its `fitted_size` within `limits`, with bicubic interpolation.

    Raises the same errors as `decode_image` and `fitted_size`.
    """
    image = decode_image(source)
    h, w = fitted_size(image.height, image.width, *limits)
    return image if image.size == (w, h) else image.resize((w, h), Image.Resampling.BICUBIC)
