"""ScreenSpot (arXiv:2401.10935): is the point that a model answers with within the box of what is to be clicked on?

A point may be in pixels of the picture as it is resized for the model, or from 0 to 1000. Both are scored, since a
model that writes the other one than expected looks as if it could see nothing. The score is that of the model's family
(`Family.coordinates`); `in_pixels` and `in_thousand` are beside it. The score is the mean over rows, as in UI-R1.
"""

import io
import json
from typing import Any

from PIL import Image

from common.errors import UserError
from common.records import ImageSource, Sample
from grading.places import Pair, contains, find_boxes, find_points
from inputs.images import FORMATS, ORIENTATION, read_source
from inputs.rows import RowError


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
    size, box = size_of(sample.images[0]), sample.fields["bbox"]
    if max(box) > 1:  # in pixels of the file
        box = [x / size[i % 2] for i, x in enumerate(box)]
    if max(box) > 1.01:
        raise UserError(
            f"{sample.source}: 'bbox' {sample.fields['bbox']} is outside its picture of {size[0]}x{size[1]}"
        )
    height, width = processor.preparation.fit(size[1], size[0])
    convention = "thousand" if processor.family.coordinates else "pixels"
    sample.fields |= {"unit_box": box, "resized": [width, height], "convention": convention}


def size_of(source: ImageSource) -> Pair:
    """Return the (width, height) of an upright picture, of which only the header is read."""
    content = read_source(source)
    if not isinstance(content, Image.Image):
        content = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)
    width, height = content.size
    return (height, width) if content.getexif().get(ORIENTATION) in (5, 6, 7, 8) else (width, height)


def hits(text: str, row: dict[str, Any]) -> tuple[str | None, bool, dict[str, float]]:
    """Return the only point of an answer, whether it hits the box, and whether it does so in each convention.

    A box counts as its centre. Several points are none. Raises UserError for saved rows without what `prepare` adds.
    """
    if missing := [name for name in ("unit_box", "resized", "convention") if name not in row]:
        raise UserError(
            f"--benchmark screenspot: a saved row has no {missing[0]!r}: score the model, or predictions that "
            "evaluate.py has saved"
        )
    found = [*find_points(text), *(((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in find_boxes(text))]
    if len(found) != 1:
        return None, False, {"in_pixels": 0.0, "in_thousand": 0.0}
    (x, y), (width, height) = found[0], row["resized"]
    hit = {
        "in_pixels": float(contains(row["unit_box"], (x / width, y / height))),
        "in_thousand": float(contains(row["unit_box"], (x / 1000, y / 1000))),
    }
    return f"[{x:g}, {y:g}]", bool(hit[f"in_{row['convention']}"]), hit
