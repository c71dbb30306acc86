"""Places in a picture: the coordinates of a file and of a model, and the boxes and points in an answer.

Not a part, because rows, rewards and benchmarks need it, and no part imports another; a plain run does not import it.

A place is (x, y), a point, or (x1, y1, x2, y2), a box with its left, upper, right and lower edge. A *size* is the
(width, height) of the upright picture in pixels of its file. An *extent* is the largest (x, y) in the coordinates of a
model: (1000, 1000), or the size of the resized picture (`Family.coordinates`). IoU, GIoU and "a point is in a box" are
the same in both, because each axis is only scaled. So gold places are converted once, and answers are left as they are.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from grading.answers import answer_part

Place = Sequence[float]
Pair = tuple[int, int]
COLUMN = re.compile(r"(?i)(?:gt_)?(?:(b?box(?:es)?)|points?)(?:_2d)?")  # columns with places; group 1: with boxes


# --- coordinates ------------------------------------------------------------------------------------------------------


def extent_of(size: Pair, processor: Any) -> Pair:
    """Return the extent of a picture of this `size` for the model of a `data.Processor`.

    Raises ValueError if the model is text-only, or if it cannot take a picture of this shape.
    """
    if processor.preparation is None:
        raise ValueError("the model is text-only")
    if side := processor.family.coordinates:
        return side, side
    height, width = processor.preparation.fit(size[1], size[0])
    return width, height


def to_model(place: Place, size: Pair, extent: Pair) -> list[int]:
    """Return a place of the file in the model's coordinates: whole numbers, a box being at least 1 wide and high."""
    scaled = [min(max(x / size[i % 2], 0), 1) * extent[i % 2] for i, x in enumerate(place)]
    whole = [round(x) for x in scaled]
    for low, high in ((0, 2), (1, 3)) if len(whole) == 4 else ():
        if whole[low] == whole[high]:
            whole[low] = min(int(scaled[low]), extent[low] - 1)
            whole[high] = whole[low] + 1
    return whole


def to_file(place: Place, size: Pair, extent: Pair) -> list[float]:
    """Return a place in the model's coordinates in pixels of the file."""
    return [x / extent[i % 2] * size[i % 2] for i, x in enumerate(place)]


def gold_places(fields: dict[str, Any], length: int) -> list[Place]:
    """Return the boxes (`length` 4) or points (2) of a row's columns, in the coordinates of the model.

    Raises ValueError if it has none, or if they are in other coordinates (docs/data.md).
    """
    own = [
        value for name, value in fields.items() if (match := COLUMN.fullmatch(name)) and bool(match[1]) == (length == 4)
    ]
    columns = [value for value in own if isinstance(value, list)]
    if not columns or fields.get("coordinates") != "model":
        kind = "boxes" if length == 4 else "points"
        raise ValueError(f"the row has no {kind} in the model's coordinates: see 'Boxes and points' in docs/data.md")
    return [place for value in columns for place in (value if not value or isinstance(value[0], list) else [value])]


# --- what an answer says ----------------------------------------------------------------------------------------------

MOST = 200  # maximum number of places that are read in an answer
_NUMBER = r"\s*([-+]?\d{1,6}(?:\.\d{1,6})?)\s*"
_OPEN, _SHUT = r"[\[(]", r"[\])]"
_BOX = re.compile(
    rf"{_OPEN}{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}{_SHUT}"
    rf"|\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)"  # Qwen2-VL, Aria
)
_POINT = re.compile(rf"{_OPEN}{_NUMBER},{_NUMBER}{_SHUT}")
_XML_POINT = re.compile(rf"""\bx(\d*)\s*=\s*["']{_NUMBER}["']\s*y\1\s*=\s*["']{_NUMBER}["']""")  # <points x1="" y1="">
_LABEL = re.compile(r"(?s)<ref>.*?</ref>|<\|object_ref_start\|>.*?<\|object_ref_end\|>")  # may have numbers, too
_MARK = re.compile(r"</?box>|<\|(?:box_(?:start|end)|(?:begin|end)_of_box)\|>|```(?:json)?")


def find_boxes(text: str) -> list[tuple[float, ...]]:
    """Return the boxes in the answer of a completion, at most `MOST`, as it writes them.

    The answer is the last `<answer>` block, or what follows `</think>`. It may be JSON with lists of four numbers under
    any names ([{"bbox_2d": [x1, y1, x2, y2], "label": …}]), or a text with [x1, y1, x2, y2] or (x1,y1),(x2,y2), within
    the marks of Qwen2-VL, GLM and InternVL or without them. A label's numbers do not count.
    """
    return _find(text, 4, _BOX)


def find_points(text: str) -> list[tuple[float, ...]]:
    """Return the points in the answer of a completion, at most `MOST`, as it writes them; see `find_boxes`.

    They are [x, y] or (x, y) in JSON or in a text, or `<points x1="…" y1="…">`. The corners of a box are no points.
    """
    answer = _BOX.sub(" ", _LABEL.sub(" ", answer_part(text)))
    if xml := [match.group(2, 3) for match in _XML_POINT.finditer(answer)]:
        return [tuple(map(float, numbers)) for numbers in xml[:MOST]]
    return _find(text, 2, _POINT)


def find_only_point(text: str) -> Place | None:
    """Return the point in the answer of a completion; None if there is none, or several. A box counts as its centre."""
    centres = [((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in find_boxes(text)]
    found = [*find_points(text), *centres]
    return found[0] if len(found) == 1 else None


def _find(text: str, length: int, pattern: re.Pattern) -> list[tuple[float, ...]]:
    answer = _MARK.sub(" ", _LABEL.sub(" ", answer_part(text)))
    try:
        return list(_lists(json.loads(answer), length))[:MOST]
    except (ValueError, RecursionError):
        answer = answer if length == 4 else _BOX.sub(" ", answer)
        found = [[x for x in match.groups() if x is not None] for match in pattern.finditer(answer)]
        return [tuple(map(float, numbers)) for numbers in found[:MOST]]


def _lists(value: Any, length: int) -> Iterator[tuple[float, ...]]:
    """Yield the lists of `length` numbers in what JSON holds."""
    if isinstance(value, list) and len(value) == length and all(type(x) in (int, float) and x == x for x in value):
        yield tuple(float(min(max(x, -1e6), 1e6)) for x in value)
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            yield from _lists(item, length)


# --- how well places agree --------------------------------------------------------------------------------------------


def area(box: Place) -> float:
    """Return the area of a box; 0 if an edge is on the wrong side."""
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def iou(a: Place, b: Place) -> float:
    """Return the intersection of two boxes over their union: 0 to 1."""
    common = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - common
    return common / union if area(a) and area(b) else 0.0


def giou(a: Place, b: Place) -> float:
    """Return the generalised IoU of two boxes (arXiv:1902.09630): −1 to 1; −1 if one has no area."""
    if not (area(a) and area(b)):
        return -1.0
    hull = area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    overlap = iou(a, b)
    union = (area(a) + area(b)) / (1 + overlap)  # since IoU = (a + b - union) / union
    return overlap - (hull - union) / hull


def contains(box: Place, point: Place) -> bool:
    """Return whether a point is in a box or on its edge."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def best_pairs(scores: Sequence[Sequence[float]]) -> list[Pair]:
    """Return the pairs (row, column) with the largest sum of `scores` (N, M); each row and column is in at most one.

    The Hungarian algorithm with potentials, O(N² M) for N ≤ M. `scipy.optimize.linear_sum_assignment` does the same,
    but SciPy is not a requirement.
    """
    if scores and len(scores) > len(scores[0]):
        return sorted((row, column) for column, row in best_pairs(list(zip(*scores))))
    columns = len(scores[0]) if scores else 0
    row_of: list[int] = [0] * (columns + 1)  # of each column; 1 is the first, 0 is none. Column 0 has the row to place.
    u, v = [0.0] * (len(scores) + 1), [0.0] * (columns + 1)
    for row in range(1, len(scores) + 1):
        row_of[0], column = row, 0
        slack, before, is_done = [float("inf")] * (columns + 1), [0] * (columns + 1), [False] * (columns + 1)
        while row_of[column]:
            is_done[column], here = True, row_of[column]
            open_columns = [j for j in range(1, columns + 1) if not is_done[j]]
            for j in open_columns:
                cost = -scores[here - 1][j - 1] - u[here] - v[j]
                if cost < slack[j]:
                    slack[j], before[j] = cost, column
            nearest = min(open_columns, key=slack.__getitem__)
            step = slack[nearest]
            for j in range(columns + 1):
                if is_done[j]:
                    u[row_of[j]], v[j] = u[row_of[j]] + step, v[j] - step
                else:
                    slack[j] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    return sorted((row_of[j] - 1, j - 1) for j in range(1, columns + 1) if row_of[j])
