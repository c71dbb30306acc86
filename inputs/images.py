"""Pictures: decoded, oriented, flattened and resized once; no later processor resizes them again.

A picture is checked when its row is loaded (`check_image`) and decoded when its row is used (`fit_image`), so that
twenty thousand rows are checked in seconds and none of them stays in memory.
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

from common.records import ImageSource

# What decoders and archives raise about what they cannot read; RuntimeError: AVIF, and compression methods unknown here
UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError),
    *(Image.DecompressionBombError, zipfile.BadZipFile, zlib.error),
)
ORIENTATION = 0x0112  # the EXIF tag; values from 5 on swap the sides


def decode_image(source: ImageSource) -> Image.Image:
    """`source` as upright 8-bit RGB. Raises ValueError when it is not a whole image, OSError when it is not there.

    EXIF orientation is applied and transparency goes on white. 16-bit and float scans are stretched from their darkest
    to their brightest value, since clipping them to 8 bit would leave a white sheet.
    """
    with _readable():
        image = ImageOps.exif_transpose(_open(source))
        image.load()
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        values = np.asarray(image, dtype=np.float64)
        values = np.where(np.isfinite(values), values, np.nan)
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 0.0)
        scaled = (np.nan_to_num(values, nan=low) - low) * (255 / max(high - low, 1e-12))
        image = Image.fromarray(scaled.round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def check_image(source: ImageSource) -> tuple[int, int]:
    """(height, width) of the upright picture once it is known to be whole. Raises like `decode_image`.

    Made to be fast: PNG by its checksums, JPEG decoded at an eighth of its size, which reads every byte of it; any
    other format is decoded in full.
    """
    if isinstance(source, Image.Image):
        return source.height, source.width
    with _readable():
        image = _open(source)
        width, height = image.size
        swapped = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= 5
        if image.format == "PNG":
            image.verify()
        else:
            image.draft("L", (1, 1))  # for JPEG; other formats have no drafts and ignore it
            image.load()
    return (width, height) if swapped else (height, width)


def read_source(source: ImageSource) -> bytes | str | pathlib.Path | Image.Image:
    """What `source` comes down to: a path, encoded bytes, or a picture. Raises ValueError when it is empty."""
    if hasattr(source, "read") and not isinstance(source, pathlib.Path | zipfile.Path):
        source = source.read()
    if isinstance(source, dict):
        source = source.get("bytes") if source.get("bytes") is not None else source.get("path")
    if source is None:
        raise ValueError("it has neither bytes nor a path")
    with _readable():
        return source.read_bytes() if isinstance(source, zipfile.Path) else source


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Whatever a decoder raises about a broken image becomes a ValueError; a missing file stays one."""
    try:
        yield
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        why = "no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)[:80]
        raise ValueError(f"not a readable image ({why})") from None


def _open(source: ImageSource) -> Image.Image:
    source = read_source(source)
    if isinstance(source, Image.Image):
        return source
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def fitted_size(
    height: int, width: int, min_pixels: int, max_pixels: int, factor: int = 28, max_side: int = 0
) -> tuple[int, int]:
    """(height, width) as multiples of `factor` with height·width within the limits and the aspect kept.

    The same sizes as Qwen2-VL's own resizing where that one stays within the limits. `max_side` bounds the longest
    side, 0 does not. Raises ValueError for pictures more than 200 times as long as wide, which the models refuse.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"the picture is {width}x{height}: its sides differ by more than 200 times")
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
    # Where the limits cannot all hold, or a thin picture's short side is at the minimum already, the upper ones do.
    if max_side:
        h, w = (max(factor, min(side, max_side // factor * factor)) for side in (h, w))
    h = max(factor, min(h, max_pixels // w // factor * factor))
    w = max(factor, min(w, max_pixels // h // factor * factor))
    return h, w


def fit_image(
    source: ImageSource, min_pixels: int, max_pixels: int, factor: int = 28, max_side: int = 0
) -> Image.Image:
    """Decode `source` and resize it once (bicubic) to `fitted_size`."""
    image = decode_image(source)
    h, w = fitted_size(image.height, image.width, min_pixels, max_pixels, factor, max_side)
    return image if image.size == (w, h) else image.resize((w, h), Image.Resampling.BICUBIC)
