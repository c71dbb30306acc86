"""A tool that enlarges a part of the picture: --plugin examples/zoom.py --env zoom (docs/turns.md)."""

import math

from common.environments import ENVIRONMENTS, Environment, tool_call

SIDE, CORNERS = 448, ("x1", "y1", "x2", "y2")  # the longer side of an enlarged part, in pixels
DESCRIPTION = "Enlarge the part of the picture from its corner (x1, y1) to its corner (x2, y2)."
PARAMETERS = {"type": "object", "properties": {corner: {"type": "number"} for corner in CORNERS}}
PARAMETERS["required"] = list(CORNERS)
TOOL = {"name": "zoom", "description": DESCRIPTION, "parameters": PARAMETERS}


def zoom(text, state, images, extents, **row):
    """Return the part of the row's picture that a turn asks for; None if it asks for nothing, but answers."""
    call = tool_call(text, ["zoom"])
    if call is None:
        return None
    if not images:
        raise ValueError("there is no picture")
    (_, arguments), (width, height), picture = call, extents[0], images[0]
    x1, y1, x2, y2 = values = [arguments.get(corner) for corner in CORNERS]
    are_numbers = all(type(value) in (int, float) for value in values)  # a bool is an int, too
    if not (are_numbers and 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise ValueError(f"zoom needs numbers with 0 <= x1 < x2 <= {width} and 0 <= y1 < y2 <= {height}")
    across, down = picture.width / width, picture.height / height
    right, bottom = min(math.ceil(x2 * across), picture.width), min(math.ceil(y2 * down), picture.height)
    part = picture.crop((int(x1 * across), int(y1 * down), right, bottom))
    larger = SIDE / max(part.size)
    return part.resize([max(1, round(side * larger)) for side in part.size])


ENVIRONMENTS["zoom"] = Environment(zoom, [{"type": "function", "function": TOOL}])
