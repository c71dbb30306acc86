"""An environment for apps/bench/turns.py: after each of the first two turns, a crop that no other episode sees."""

import secrets

from common.environments import ENVIRONMENTS, Environment


def crop(text, state, images, extents, **row):
    """Return a random part of the row's picture in the picture's size; None after the third turn."""
    state["turns"] = state.get("turns", 0) + 1
    if state["turns"] == 3:
        return None
    picture = images[0]
    width, height = picture.width * 2 // 3, picture.height * 2 // 3
    x, y = secrets.randbelow(picture.width - width), secrets.randbelow(picture.height - height)
    return picture.crop((x, y, x + width, y + height)).resize(picture.size)


ENVIRONMENTS["crop"] = Environment(crop)
