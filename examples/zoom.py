"""A tool that enlarges a part of the picture: --plugin examples/zoom.py --env zoom (docs/turns.md)."""

import math

from PIL import ImageOps

from common.environments import ENVIRONMENTS, Environment, tool_call

SIDE, NUMBER = 448, {"type": "number"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Enlarge the part of the picture from its corner (x1, y1) to its corner (x2, y2).",
        "parameters": {
            "type": "object",
            "properties": {"x1": NUMBER, "y1": NUMBER, "x2": NUMBER, "y2": NUMBER},
            "required": ["x1", "y1", "x2", "y2"],
        },
    },
}


def zoom(text, state, images, extents, **row):
    """Return the part of the row's picture that a turn asks for; None if it asks for nothing, but answers."""
    call = tool_call(text)
    if call is None:
        return None
    name, arguments = call
    if name != "zoom":
        raise ValueError(f"there is no tool {name!r}")
    x1, y1, x2, y2 = (float(arguments[key]) for key in ("x1", "y1", "x2", "y2"))
    (width, height), picture = extents[0], images[0]
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise ValueError(f"the part must lie in the picture, which ends at ({width}, {height})")
    across, down = picture.width / width, picture.height / height
    part = picture.crop((int(x1 * across), int(y1 * down), math.ceil(x2 * across), math.ceil(y2 * down)))
    return ImageOps.contain(part, (SIDE, SIDE))


ENVIRONMENTS["zoom"] = Environment(zoom, [SCHEMA])
