"""The rewards of `./run.sh click`: those of UI-R1 (arXiv:2503.21620), for the action and the place, beside the format.

Rows have the name of the action as `answer` and, for a click, `bbox` in the coordinates of the model (docs/data.md).
"""

import re

from grading.answers import answer_part
from grading.places import contains, find_points

ACTION = re.compile(r"""["']action["']\s*:\s*["']?(\w+)""")


def action(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the answer block names the action of the row and no other, else 0."""
    return float(set(ACTION.findall(answer_part(completion))) == {answer})


def place(completion: str, answer: str, bbox: list | None = None, coordinates: str = "", **_: object) -> float:
    """Return 1 if the action is right and, for a click, its only point is in the row's box or on its edge; else 0.

    UI-R1 takes the first of several points; here they score 0, so that listing points is no way to hit the box.
    """
    if not action(completion, answer) or answer != "click":
        return action(completion, answer)
    if bbox is None or coordinates != "model":
        raise ValueError("a click needs 'bbox', and 'coordinates' that say in which units it is (docs/data.md)")
    points = find_points(completion)
    return float(len(points) == 1 and contains(bbox, points[0]))
