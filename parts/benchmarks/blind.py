"""The same rows without what their pictures show (`--picture`): how much of a score needs the picture?

    python evaluate.py --model DIR --data FILE --baseline runs/evaluation --picture blank --output runs/blank

`blank`: each picture becomes grey and keeps its size, so that a prompt keeps its tokens. Its mean colour would still
tell something: on white paper, how much is drawn. `other`: each row gets the pictures of another row. Only the model
and its tools (`--env`) see these; rewards and pages get the row's own.
"""

import functools
import io
import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from PIL import Image

from common import console, distributed
from common.errors import UserError
from common.records import ImageSource, Sample
from data import Processor, digest_of
from inputs.images import decode_image, fit_image


class Pictures(NamedTuple):
    """What is known of a row's own pictures."""

    names: tuple[str, ...]  # a hash of each
    sizes: list[tuple[int, int]]  # (width, height) in pixels
    tokens: int  # of all of them in the prompt
    digest: str  # `Prompt.image_digest`, by which a baseline finds the row


def check_baseline(cfg: Any) -> None:
    """Raise UserError unless `--baseline`, if given, is the same model, which sees the rows' own pictures."""
    own = baseline = cfg.adapter or cfg.model
    if cfg.baseline:
        path = pathlib.Path(cfg.baseline, "scores.json")
        scores = json.loads(path.read_bytes()) if path.is_file() and cfg.baseline_is_saved else {}
        baseline = scores.get("adapter") or scores.get("model") or (own if cfg.baseline_is_saved else cfg.baseline)
        if "picture" in scores:
            raise UserError(f"--baseline {cfg.baseline}: it had no pictures, either: give the evaluation with them")
    if os.path.realpath(baseline) != os.path.realpath(own):
        how = f"give --baseline {own}, or its evaluation with pictures"
        raise UserError(f"--picture {cfg.picture} compares a model with itself, not {own} with {baseline}: {how}")


def swap_pictures(cfg: Any, samples: list[Sample], processor: Processor) -> tuple[list[Sample], list[str]]:
    """Return the rows with other pictures, and the hash of each row's own.

    Raises UserError if there are no pictures, no other ones, or if they make a prompt too long.
    """
    with distributed.shared_errors(), ThreadPoolExecutor() as pool:
        local = list(pool.map(functools.partial(_look, processor), distributed.shard(samples)))
    own = distributed.gather_shards(local)
    lacking = sum(not each.names for each in own)
    if lacking == len(own):
        raise UserError(f"--picture {cfg.picture}: none of the {len(own)} rows has a picture: leave it out")
    if lacking:
        console.log(f"note: {lacking} of {len(own)} rows have no picture, so that --picture changes nothing for them")
    rows = other_rows(samples, own) if cfg.picture == "other" else range(len(own))
    swapped = []
    for sample, each, row in zip(samples, own, rows):
        images: list[ImageSource] = (
            [_grey(size) for size in each.sizes] if cfg.picture == "blank" else samples[row].images
        )
        length = sample.tokens - each.tokens + own[row].tokens
        if length > cfg.max_prompt_length:
            problem = f"{length} tokens with the picture of {samples[row].source}; --max_prompt_length is"
            raise UserError(f"--picture other: {sample.source} has {problem} {cfg.max_prompt_length}: raise it")
        swapped.append(replace(sample, teacher_images=images).for_teacher)  # which puts them in the pictures' places
    return swapped, [each.digest for each in own]


def _look(processor: Processor, sample: Sample) -> Pictures:
    try:
        images = [decode_image(source) for source in sample.images]
    except (OSError, ValueError) as error:
        raise UserError(f"{sample.source}: {error}; it passed the check at the start: restore or replace it") from None
    fitted = [fit_image(image, processor.preparation.fit) for image in images]
    tokens = sum(processor.preparation.count(image.height, image.width) for image in fitted)
    names = tuple(digest_of([image]).hex() for image in images)
    return Pictures(names, [image.size for image in images], tokens, digest_of(fitted).hex() if fitted else "")


def other_rows(samples: Sequence[Sample], own: Sequence[Pictures]) -> list[int]:
    """Return for each row one that has as many pictures, but none of its own if there is such a row.

    Rows with the same pictures get the same others. The order of the hashes decides, as neighbours may be alike.
    """
    first: dict[tuple[str, ...], int] = {}
    for row, each in enumerate(own):
        first.setdefault(each.names, row)
    others: dict[tuple[str, ...], tuple[str, ...]] = {(): ()}
    for number, group in itertools.groupby(sorted(first, key=lambda names: (len(names), names)), len):
        ring = list(group)
        for i, names in enumerate(ring if number else []):
            rest = ring[i + 1 :] + ring[:i]
            if not rest:
                problem = "no row has as many pictures and other ones: use --picture blank, or leave the row out"
                raise UserError(f"--picture other: {samples[first[names]].source}: {problem}")
            others[names] = next((other for other in rest if not {*other} & {*names}), rest[0])
    if kept := sum(bool({*others[each.names]} & {*each.names}) for each in own):
        console.log(f"note: {kept} rows keep a picture of their own, as every other row with as many has one of theirs")
    return [first[others[each.names]] for each in own]


@functools.cache
def _grey(size: tuple[int, int]) -> bytes:
    """Return a grey picture as a PNG, which takes a kilobyte for a million pixels."""
    file = io.BytesIO()
    Image.new("L", size, 128).save(file, "PNG")
    return file.getvalue()
