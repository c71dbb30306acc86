"""`data.py overlap` finds pictures and questions that two data sets share; a run with `--eval_data` counts pictures.

    python data.py overlap TRAIN TEST                              # what they share
    python data.py overlap TRAIN TEST --output_jsonl NEW.jsonl     # also write TRAIN without what TEST has

Two pictures are *equal* if they have the same size and pixels after decoding, however they are stored. They are *nearly
equal* if their difference hashes are (dHash: which of two neighbouring cells of a small grey copy is brighter). This
finds pictures that were scaled or compressed again, not those that were cut, turned or mirrored.
"""

import hashlib
import os
import pathlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tyro
from PIL import Image

from common import console
from common.errors import UserError
from common.records import TAG, ImageSource, Sample
from config import RowFlags
from data import digest_of, summarise
from inputs.images import decode_image, read_source
from inputs.rows import Problem, read_rows
from parts.convert.rows import check_output, write_rows

SIDE = 16  # cells along a side of the grey copy
MARGIN = 0.05  # of the copy's standard deviation: smaller steps are compression's, or rounding's
ALIKE = 0.8  # of the steps that one of two pictures has, the other must have this fraction
BLOCK = 1024  # pictures whose hashes are compared at a time
SHOWN = 5  # pairs that are listed


@dataclass
class OverlapFlags(RowFlags):
    """Find the pictures and questions that two data sets share."""

    command: tyro.conf.Positional[Literal["overlap"]]
    """The command to run."""
    train: tyro.conf.Positional[str]
    """The training rows, in any format that training accepts."""
    test: tyro.conf.Positional[str]
    """The rows to score on, in any format that training accepts."""
    output_jsonl: str | None = None
    """Also write the training rows that share no picture with the test rows, nor, without a picture, their question:
    NAME.jsonl or NAME.parquet."""
    overwrite: bool = False
    """Replace `output_jsonl` if it exists."""

    def __post_init__(self) -> None:
        self.check_rows()


@dataclass
class Rows:
    """The rows of a data set, and their D different pictures."""

    name: str
    samples: list[Sample]
    of_row: list[list[int]]  # the pictures of each row, as indices
    digests: dict[bytes, int]  # of a picture's size and pixels -> its index
    hashes: np.ndarray  # (D, 2 · SIDE²): 1 where the grey copy gets brighter, and where it gets darker; else 0

    def source_of(self, picture: int) -> str:
        """Return where the first row with a picture is."""
        return next(row.source for row, own in zip(self.samples, self.of_row) if picture in own)


def overlap(cfg: OverlapFlags) -> str:
    """Return what two data sets share, and write the training rows without that if `cfg` names a file."""
    if cfg.output_jsonl:
        check_output(cfg.output_jsonl, cfg.overwrite)
    train, test = look_at(cfg.train, cfg), look_at(cfg.test, cfg)
    shared, num_equal = shared_pictures(train, test)
    num_rows = sum(any(picture in shared for picture in own) for own in test.of_row)
    asked = {question_of(row) for row in train.samples}
    asked_of = {(picture, question_of(row)) for row, own in zip(train.samples, train.of_row) for picture in own}
    same = [(question_of(row), own) for row, own in zip(test.samples, test.of_row) if question_of(row) in asked]
    leaked = sum(any((shared.get(picture), question) in asked_of for picture in own) for question, own in same)
    lines = [
        f"pictures: {len(shared)} of the {len(test.digests)} in {test.name} are among the {len(train.digests)} in "
        f"{train.name}: {num_equal} equal after decoding, {len(shared) - num_equal} nearly equal",
        f"rows: {num_rows} of the {len(test.samples)} in {test.name} have such a picture; {len(same)} have the "
        f"question of a row in {train.name}, {leaked} of them with the same picture",
    ]
    for number, (picture, other) in enumerate(shared.items()):
        if number < SHOWN or num_equal <= number < num_equal + SHOWN:
            kind = "equal" if number < num_equal else "nearly equal"
            lines.append(f"{kind}: {test.source_of(picture)} and {train.source_of(other)}")
    if cfg.output_jsonl:
        lines.append(write_without(cfg, train, test))
    return "\n".join(lines)


def look_at(spec: str, cfg: OverlapFlags) -> Rows:
    """Read the rows of a data set and decode each of their pictures once.

    Raises UserError if a row or a picture cannot be read, unless such rows are to be left out.
    """
    rows = list(read_rows(spec, cfg.image_dir, cfg.named_columns))

    def look(row: Sample | Problem) -> list[tuple[bytes, np.ndarray]] | str:
        if isinstance(row, Problem):
            return row.message
        try:
            return [look_once(source) for source in row.images]
        except (OSError, ValueError) as error:
            return str(error)

    known: dict[bytes, tuple[bytes, np.ndarray]] = {}  # what was seen of a stored picture

    def look_once(source: ImageSource) -> tuple[bytes, np.ndarray]:
        if (name := name_of(source)) not in known:
            image = decode_image(source)
            known[name] = digest_of([image]), difference_hash(image)
        return known[name]

    with ThreadPoolExecutor() as pool:  # decoding releases the GIL
        looked = list(console.progress(pool.map(look, rows), f"looking at {spec}", total=len(rows), unit="row"))
    if bad := [f"{row.source}: {found}" for row, found in zip(rows, looked) if isinstance(found, str)]:
        problems = summarise(bad, f"of {len(rows)} rows cannot be used")
        if not cfg.skip_bad_rows:
            raise UserError(f"{problems}; fix them or pass --skip_bad_rows to leave them out")
        console.log(f"skipped: {problems}")
    good = [(row, found) for row, found in zip(rows, looked) if isinstance(row, Sample) and not isinstance(found, str)]
    table = {digest: steps for _, found in good for digest, steps in found}
    index = {digest: number for number, digest in enumerate(table)}
    of_row = [[index[digest] for digest, _ in found] for _, found in good]
    hashes = np.stack([*table.values()]) if table else np.zeros((0, 2 * SIDE * SIDE), np.float32)
    return Rows(spec, [row for row, _ in good], of_row, index, hashes)


def shared_pictures(train: Rows, test: Rows) -> tuple[dict[int, int], int]:
    """Return picture of `test` -> picture of `train`, first those that are equal; and how many these are."""
    equal = {i: train.digests[digest] for digest, i in test.digests.items() if digest in train.digests}
    return equal | {i: j for i, j in nearly_equal(train.hashes, test.hashes).items() if i not in equal}, len(equal)


def name_of(source: ImageSource) -> bytes:
    """Return what tells a stored picture from others: a hash of its bytes, or its path."""
    content = read_source(source)
    if isinstance(content, bytes):
        return hashlib.blake2b(content, digest_size=16).digest()
    return str(content).encode() if isinstance(content, str | pathlib.Path) else digest_of([content])


def difference_hash(image: Image.Image) -> np.ndarray:
    """Return the difference hash of a picture, (2 · SIDE²,): all zero if it has one colour."""
    grey = image.convert("L").convert("F").resize((SIDE + 1, SIDE), Image.Resampling.BOX)  # "F": cells are not rounded
    cells = np.asarray(grey)  # (SIDE, SIDE + 1)
    step, least = np.diff(cells, axis=1), max(MARGIN * float(cells.std()), 1e-3)
    return np.concatenate([(step > least).ravel(), (step < -least).ravel()]).astype(np.float32)


def nearly_equal(ours: np.ndarray, theirs: np.ndarray) -> dict[int, int]:
    """Return index in `theirs` (E, K) -> index in `ours` (D, K) of the nearest hash, where it is near enough."""
    found: dict[int, int] = {}
    for start in range(0, len(theirs) if len(ours) else 0, BLOCK):
        block = theirs[start : start + BLOCK]
        common = block @ ours.T  # steps that both have
        alike = common / np.maximum(block.sum(1)[:, None] + ours.sum(1) - common, 1)
        best = alike.argmax(1)
        found |= {start + j: int(i) for j, i in enumerate(best) if alike[j, i] >= ALIKE}
    return found


def question_of(row: Sample) -> str:
    """Return the texts of a row, without tags, case and white space at the ends."""
    return " ".join("\n".join(row.texts).replace(TAG, " ").casefold().split())


def write_without(cfg: OverlapFlags, train: Rows, test: Rows) -> str:
    """Write the training rows that share nothing with the test rows; return how many they are."""
    shared, _ = shared_pictures(test, train)
    asked = {question_of(row) for row in test.samples}
    kept = [
        row
        for row, own in zip(train.samples, train.of_row)
        if not (shared.keys() & set(own)) and (own or question_of(row) not in asked)
    ]
    if not kept:
        raise UserError(f"every row in {train.name} shares something with {test.name}: there is nothing to write")
    write_rows(kept, str(cfg.output_jsonl))
    return f"{cfg.output_jsonl}: {len(kept)} of the {len(train.samples)} rows in {train.name}, which share no picture"


# --- held-out rows of a run -------------------------------------------------------------------------------------------


def hold_out(samples: list[Sample], cfg: Any) -> tuple[list[Sample], list[Sample]]:
    """Return the rows to train on, and those of a random `eval_fraction` of the pictures or, without any, of the texts.

    Pictures are the same if their bytes are.
    """
    with ThreadPoolExecutor() as pool:
        bytes_of = _hash_bytes(pool, samples, None)
    shown = [repr([bytes_of[_place(source)] for source in row.images] or row.texts) for row in samples]
    kinds = list(dict.fromkeys(shown))
    chosen = set(random.Random(cfg.seed).sample(kinds, int(cfg.eval_fraction * len(kinds))))
    held_out = [row for row, kind in zip(samples, shown) if kind in chosen]
    console.log(f"held out: {len(held_out)} of {len(samples)} rows")
    return [row for row, kind in zip(samples, shown) if kind not in chosen], held_out


def log_shared(train: list[Sample], test: list[Sample]) -> None:
    """Print how many pictures of the held-out rows `test` are, byte for byte, also in the rows `train`.

    Files are read only if a held-out picture has as many bytes, and nothing is decoded: a start is not delayed.
    """
    if console.is_main():
        try:
            console.log(f"--eval_data: {count_shared(train, test)}")
        except (OSError, ValueError) as error:
            console.log(
                f"note: the pictures of --eval_data were not compared with those of the training rows ({error})"
            )


def count_shared(train: list[Sample], test: list[Sample]) -> str:
    """Return the line that `log_shared` prints."""
    with ThreadPoolExecutor() as pool:
        theirs = _hash_bytes(pool, test, None)
        ours = set(_hash_bytes(pool, train, {size for size, _ in theirs.values()}).values())
    shared = set(theirs.values()) & ours
    rows = sum(any(theirs[_place(source)] in shared for source in row.images) for row in test)
    return (
        f"{len(shared)} of its {len(set(theirs.values()))} pictures, in {rows} of {len(test)} rows, are also in the "
        "training rows, compared by the bytes of their files (data.py overlap also finds copies in other files)"
    )


def _place(source: ImageSource) -> object:
    """Return what names a stored picture without reading it: its path, or the source itself."""
    return str(source) if isinstance(source, pathlib.Path) else id(source)


def _hash_bytes(
    pool: ThreadPoolExecutor, rows: list[Sample], sizes: set[int] | None
) -> dict[object, tuple[int, bytes]]:
    """Return (size, hash) of the bytes of each picture whose size is in `sizes`, or of all, by `_place`."""

    def look(source: ImageSource) -> tuple[int, bytes]:
        content = read_source(source)
        if isinstance(content, Image.Image):
            content = content.tobytes()
        size = len(content) if isinstance(content, bytes) else os.path.getsize(content)
        if sizes is not None and size not in sizes:
            return size, b""
        if not isinstance(content, bytes):
            content = pathlib.Path(content).read_bytes()
        return size, hashlib.blake2b(content, digest_size=16).digest()

    sources = {_place(source): source for row in rows for source in row.images}
    return dict(zip(sources, pool.map(look, sources.values())))
