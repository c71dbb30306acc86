"""Rows with boxes or points: in which coordinates they are, and what the model is asked to write.

    {"prompt": "Where is the cat?", "images": ["cat.png"], "bbox": [12, 40, 200, 310], "coordinates": "file"}

`coordinates` names those of the row: "file" (pixels of the upright picture), "unit" (0 to 1), "thousand" (0 to 1000) or
"model" (as the model writes them). Boxes are [x1, y1, x2, y2]; with "file xywh" and so on, [x, y, width, height]. The
places are converted here, once, to what the model's family writes for the picture as it is resized (grading/places.py):
in their column, and in the prompt and the answer, where a tag `<bbox>` or `<point>` stands for the next one.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from common.records import Sample
from grading.places import COLUMN, Pair, extent_of, to_model
from inputs.images import UNREADABLE, check_image
from inputs.rows import RowError

TAG = {4: "<bbox>", 2: "<point>"}  # what stands for a place of so many numbers in a text
UNITS = ("file", "unit", "thousand")
FORMS = f"{', '.join(UNITS)} or model, and for boxes [x, y, width, height] file xywh and so on"


def with_places(sample: Sample, processor: Any) -> Sample:
    """Convert the places of a row, in place, to the coordinates of the model of a `data.Processor`.

    Without a `processor`, places stay as they are. A row with places alone gets them as its answer. Raises RowError if
    it is not known in which coordinates they are, or if they cannot be in the row's picture.
    """
    found = {name: numbers for name, value in sample.fields.items() if (numbers := _places(name, value)) is not None}
    if not found:
        texts = "\n".join([*sample.texts, *sample.responses])
        if "objects" in sample.fields and any(tag in texts for tag in TAG.values()):
            raise RowError("'objects' holds places: write them in columns 'bbox' or 'point', with 'coordinates'")
        return sample
    _answer_with(sample, found)
    if processor is None:
        return sample
    if sample.fields.get("coordinates") != "model":
        _convert(sample, found, processor)
    _fill(sample, found)
    return sample


def _places(name: str, value: Any) -> list | None:
    """Return the places in a column, a list of lists of numbers; None if it holds none. Raises RowError."""
    match = COLUMN.fullmatch(name)
    if match and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{name!r} holds a list that is not JSON: {value[:40]}") from None
    if not match or not isinstance(value, list):
        return None
    length = 4 if match[1] else 2
    places = value if all(isinstance(place, list) for place in value) else [value]
    if not all(
        len(place) == length and all(type(x) in (int, float) and abs(x) < 1e6 for x in place) for place in places
    ):
        form = "[x1, y1, x2, y2]" if match[1] else "[x, y]"
        raise RowError(f"{name!r} is neither {form} nor a list of them: {str(value)[:40]}; write it so, or rename it")
    return places


def _is_list(value: Any) -> bool:
    """Return whether a column holds a list of places, of any number, and not just one."""
    value = json.loads(value) if isinstance(value, str) else value
    return not value or isinstance(value[0], list)


def _answer_with(sample: Sample, found: dict[str, list]) -> None:
    """Write tags for the places as the answer of a row that has none."""
    if sample.answer:
        return
    if len(found) > 1:
        raise RowError(f"no answer, and places in {' and '.join(map(repr, found))}: write it, with <bbox> or <point>")
    ((name, places),) = found.items()
    tags = ", ".join(TAG[len(place)] for place in places)
    sample.answer = f"[{tags}]" if _is_list(sample.fields[name]) else tags
    sample.responses = [sample.answer]


def _convert(sample: Sample, found: dict[str, list], processor: Any) -> None:
    """Replace the places in `found`, and in their columns, by those that the model writes."""
    name, images = next(iter(found)), sample.images
    unit, _, form = str(sample.fields.get("coordinates")).partition(" ")
    if unit not in UNITS or form not in ("", "xywh"):
        given = repr(sample.fields["coordinates"]) if "coordinates" in sample.fields else "missing"
        raise RowError(f"{name!r} holds places, and the column 'coordinates' is {given}: write {FORMS}")
    if len(images) != 1:
        raise RowError(
            f"{name!r} holds places in one picture, and the row has {len(images)}: write 'coordinates': 'model'"
        )
    if sample.teacher_images and not processor.family.coordinates:
        raise RowError(
            f"{name!r} would be in pixels of the model's picture, and the teacher sees 'teacher_images': remove one"
        )
    if "extent" in sample.fields:
        raise RowError("a column is named 'extent', the largest (x, y) of the model: rename the column")
    try:
        height, width = check_image(images[0], decode=False)
        size = width, height
        extent = extent_of(size, processor)
    except UNREADABLE as error:
        raise RowError(f"{name!r} cannot be converted: {error}") from None
    for name, places in found.items():
        places[:] = [to_model(_in_file(name, place, unit, form, size), size, extent) for place in places]
        sample.fields[name] = places if _is_list(sample.fields[name]) else places[0]
    sample.fields |= {"coordinates": "model", "extent": list(extent)}


def _in_file(name: str, place: list, unit: str, form: str, size: Pair) -> list[float]:
    """Return a place of a row in pixels of the file, with the edges of a box. Raises RowError if it cannot be one."""
    if form and len(place) == 4:
        place = [*place[:2], place[0] + place[2], place[1] + place[3]]
    largest = {"file": size, "unit": (1, 1), "thousand": (1000, 1000)}[unit]
    scaled = [x / largest[i % 2] for i, x in enumerate(place)]
    slack = [max(0.01, 1 / side) for side in size]  # boxes of annotators end a pixel outside
    where = f"{name!r}: {str(place)[:60]}"
    if any(not -slack[i % 2] <= x <= 1 + slack[i % 2] for i, x in enumerate(scaled)):
        raise RowError(f"{where} is outside the picture of {size[0]}x{size[1]} pixels if 'coordinates' is {unit!r}")
    if unit == "file" and (max(place) <= 1 if len(place) == 4 else all(0 < x < 1 for x in place)):
        raise RowError(f"{where} is less than a pixel if 'coordinates' is 'file': is it 'unit'?")
    if len(place) == 4 and not (place[0] < place[2] and place[1] < place[3]):
        raise RowError(f"{where} has no area as [x1, y1, x2, y2]: if it is [x, y, width, height], write '{unit} xywh'")
    return [x * size[i % 2] for i, x in enumerate(scaled)]


def _fill(sample: Sample, found: dict[str, list]) -> None:
    """Write the places in `found` for the tags in a row's texts, in order. Raises RowError if their numbers differ."""
    response = sample.responses[0] if sample.responses else sample.answer
    for length, tag in TAG.items():
        places = [place for name, own in found.items() for place in own if len(place) == length]
        count, in_answer = "\n".join([*sample.texts, response]).count(tag), sample.answer.count(tag)
        if count and count != len(places):
            raise RowError(f"{count} tags {tag} in the prompt and the answer, and {len(places)} places for them")
        remaining = iter(places)
        for turn in sample.turns:
            turn.content[:] = [
                _filled(text, tag, remaining) if isinstance(text, str) else text for text in turn.content
            ]
        response = _filled(response, tag, remaining)
        sample.answer = _filled(sample.answer, tag, iter(places[len(places) - in_answer :]))
    sample.responses = [response]


def _filled(text: str, tag: str, places: Iterator[list]) -> str:
    return re.sub(re.escape(tag), lambda _: json.dumps(next(places)), text)
