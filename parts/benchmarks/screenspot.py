"""ScreenSpot (arXiv:2401.10935): is the point that a model answers with within the box of what is to be clicked on?

A point may be in pixels of the picture as it is resized for the model, or from 0 to 1000. Both are scored, since a
model that writes the other one than expected looks as if it could see nothing. The score is that of the model's family
(`Family.coordinates`); `in_pixels` and `in_thousand` are beside it. The score is the mean over rows, as in UI-R1.
"""

import json
from typing import Any

from common.errors import UserError
from common.records import Sample
from grading.places import contains, find_only_point
from inputs.images import check_image
from inputs.rows import RowError

CONVENTIONS = {"pixels": "in pixels of the resized picture", "thousand": "from 0 to 1000"}


def gold_box(row: dict[str, Any]) -> str:
    """Return the box of a row, [x1, y1, x2, y2] from 0 to 1 or in pixels of the file, as text. Raises RowError."""
    box = row["bbox"]
    numbers = isinstance(box, list) and len(box) == 4 and all(type(x) in (int, float) for x in box)
    if not numbers or not (0 <= box[0] < box[2] and 0 <= box[1] < box[3]):
        raise RowError(f"'bbox' is {str(box)[:40]}, not the edges [x1, y1, x2, y2] of a box, from 0 to 1 or in pixels")
    return json.dumps(box)


def prepare(sample: Sample, processor: Any) -> None:
    """Add what `hits` needs to a row: the box from 0 to 1, the size of the resized picture, the family's convention.

    Raises UserError if the box is not within the picture.
    """
    height, width = check_image(sample.images[0], decode=False)
    size, box = (width, height), sample.fields["bbox"]
    if max(box) > 1:  # in pixels of the file
        box = [x / size[i % 2] for i, x in enumerate(box)]
    if max(box) > 1.01:
        raise UserError(
            f"{sample.source}: 'bbox' {sample.fields['bbox']} is outside its picture of {size[0]}x{size[1]}"
        )
    height, width = processor.preparation.fit(height, width)
    kind = "thousand" if processor.family.coordinates else "pixels"
    sample.fields |= {"unit_box": box, "resized": [width, height], "convention": kind}


def convention(row: dict[str, Any]) -> str:
    """Return how the points for a row are read."""
    return f"points {CONVENTIONS[row['convention']]}"


def hits(text: str, row: dict[str, Any]) -> tuple[str | None, bool, dict[str, float]]:
    """Return the only point of an answer, whether it hits the box, and whether it does so in each convention.

    A box counts as its centre. Several points are none. Raises UserError for saved rows without what `prepare` adds.
    """
    if missing := [name for name in ("unit_box", "resized", "convention") if name not in row]:
        raise UserError(
            f"--benchmark screenspot: a saved row has no {missing[0]!r}: score the model, or predictions that "
            "evaluate.py has saved"
        )
    point = find_only_point(text)
    if point is None:
        return None, False, {"in_pixels": 0.0, "in_thousand": 0.0}
    (x, y), (width, height) = point, row["resized"]
    hit = {
        "in_pixels": float(contains(row["unit_box"], (x / width, y / height))),
        "in_thousand": float(contains(row["unit_box"], (x / 1000, y / 1000))),
    }
    return f"[{x:g}, {y:g}]", bool(hit[f"in_{row['convention']}"]), hit
