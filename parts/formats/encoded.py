"""Images as base64, in a data: URL or alone: wrapped, percent-encoded, in the alphabet of URLs, without padding."""

import base64
import contextlib
import re
import urllib.parse

from inputs.rows import RowError

# A picture begins with the name of its format; paths have a dot soon.
PICTURE = r"\s*(?:b?['\"])?(iVBORw0KGgo|[/_]9j[/_]|%2F9j%2F|R0lGOD|UklGR|SUkq|TU0AK|Qk.{6}AAAA)[^.]{40}"
ENCODED = re.compile(rf"\s*(?i:data(:|%3A)|(image/[\w.+-]+;)?base64,)|{PICTURE}")
# Line breaks, also escaped ones; quotes of Python's bytes; the alphabet of URLs.
SPELLINGS = [(mark, "") for mark in ("\\n", "\\r", "\n", "\r", "\t", " ", "b'", "'", '"')] + [("-", "+"), ("_", "/")]


def decoded(image: object) -> object:
    """Return the bytes of an image that is given as base64, also as {"bytes": text}; others are returned unchanged."""
    values = image.values() if isinstance(image, dict) else [image]
    text = next((value for value in values if isinstance(value, str) and ENCODED.match(value)), None)
    if text is None:
        return image
    with contextlib.suppress(ValueError):  # most are written as they should be
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    text = urllib.parse.unquote(text).rpartition(",")[2]
    for written, meant in SPELLINGS:
        text = text.replace(written, meant)
    text = text.rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise RowError("an image is text with invalid base64: encode the image again") from None
