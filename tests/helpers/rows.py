"""Samples for tests."""

from typing import Any

from common.records import TAG, Sample, Turn


def make_sample(prompt: str, answer: str, images: list, source: str, fields: dict | None = None, **more: Any) -> Sample:
    """Return a row whose prompt is one question, with `images` in the places of its tags.

    Without tags, the images come first. The tag of a missing image stays. `more`: further fields of the sample.
    """
    first, *rest = prompt.split(TAG)
    content = [first] if rest else [*images, first]
    for i, text in enumerate(rest):
        content += [images[i] if i < len(images) else TAG, text]
    return Sample([Turn("user", [piece for piece in content if piece != ""])], answer, source, fields or {}, **more)
