"""Pictures and rows for the model of `vlm.py`: numbers drawn here, and easy-VQA's shapes and colours.

The rows to read with, and those of easy-VQA's training split, are for SFT: they say what is in a picture, and nothing
else. The answers of the rows for GRPO are the sums of two numbers. Pairs of numbers to test with are in no other row.
"""

import hashlib
import json
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common import console
from common.errors import UserError

EASY_VQA = "easy_vqa-1.0-py3-none-any.whl"  # Victor Zhou, MIT License
SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
SIZE = 112  # side of a picture in pixels: 16 image tokens, and one window of the vision tower
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmr10", "cmss10", "cmtt10")
SMALLEST = 26  # size of a number in pixels; the largest fills its part of the picture
READING, SUMS, HELD_OUT = 32768, 4096, 512  # numbers of pictures
QUESTIONS = (  # what SFT asks about a picture with two numbers, in the order in which one reads them
    ("Which two numbers are in the picture?", "{0} and {1}"),
    ("Read both numbers.", "{0}, {1}"),
    ("Write the two numbers with a plus sign between them.", "{0} + {1}"),
    ("Which number comes first?", "{0}"),
    ("Which number comes second?", "{1}"),
)
ONE = "Which number is in the picture?"
SUM = "What is the sum of the two numbers in the picture?"


def draw_numbers(numbers: list[int], rng: np.random.Generator) -> Image.Image:
    """Return a picture of one number, or of two beside or below each other, each in a font, size and colour of its own.

    Dark numbers stand on a pale background; with pale ones on dark backgrounds among them, learning takes longer
    (docs/log.md). Two numbers beside each other are about on a line, so that it is clear which comes first.
    """
    ground = rng.integers(190, 256, 3)
    image = Image.new("RGB", (SIZE, SIZE), tuple(ground.tolist()))
    draw = ImageDraw.Draw(image)
    half, line = SIZE // 2, int(rng.integers(SIZE // 2))
    cells = [(0, 0, SIZE, SIZE)]  # x, y, width and height
    if len(numbers) == 2:
        beside = [(0, line, half, half), (half, line, half, half)]
        cells = beside if rng.random() < 0.5 else [(0, 0, SIZE, half), (0, half, SIZE, half)]
    for number, (x, y, width, height) in zip(numbers, cells):
        colour = rng.integers(0, 120, 3)
        largest = SIZE * 2 // (1 + len(numbers)) // (1 + len(str(max(numbers))))
        font = load_font(FONTS[rng.integers(len(FONTS))], int(rng.integers(SMALLEST, max(largest, 42) + 1)))
        left, top, right, bottom = font.getbbox(str(number))
        free = max(width - (right - left) - 4, 1), max(height - (bottom - top) - 4, 1)
        at = x + 2 + rng.integers(free[0]) - left, y + 2 + rng.integers(free[1]) - top
        draw.text(at, str(number), fill=tuple(colour.tolist()), font=font)
    return image


def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Return one of the fonts that matplotlib brings; `size` is in pixels."""
    return ImageFont.truetype(str(pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")), size)


def pairs_of_numbers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return all ordered pairs of numbers from 1 to 99, shuffled, as those to test with and all others, (·, 2)."""
    pairs = rng.permutation(99 * 99)[:, None] // (99, 1) % 99 + 1
    return pairs[:HELD_OUT], pairs[HELD_OUT:]


def reading_rows(pairs: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[list[int], str, str]]:
    """Yield `READING` times the numbers of a picture, a question and its answer. A third each show a digit, a number.

    With two small numbers alone, a new vision tower does not begin to learn (docs/log.md).
    """
    for i in range(READING):
        if i % 3 != 2:
            number = int(rng.integers(1, 10 if i % 3 == 0 else 100))
            yield [number], ONE, str(number)
            continue
        numbers = pairs[rng.integers(len(pairs))].tolist()
        question, answer = QUESTIONS[rng.integers(len(QUESTIONS))]
        yield numbers, question, answer.format(*numbers)


def write_drawn(output: pathlib.Path, name: str, rows: Iterator[tuple[list[int], str, str]], seed: int) -> list[dict]:
    """Draw the picture of each row to OUTPUT/NAME; return the rows as training reads them."""
    rng, written = np.random.default_rng(seed), []
    (output / name).mkdir(exist_ok=True)
    for i, (numbers, question, answer) in enumerate(console.progress(list(rows), f"drawing {name}", unit="picture")):
        file = f"{name}/{i:05d}.png"
        draw_numbers(numbers, rng).save(output / file)
        written.append({"prompt": f"<image>{question}", "answer": answer, "images": [file]})
    return written


def check_package(parts: pathlib.Path) -> None:
    """Raise UserError unless `parts` has easy-VQA as it was published."""
    package = parts / EASY_VQA
    if not package.is_file():
        raise UserError(f"{package}: missing; download it with the model's packages")
    if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{package}: not the published package; download it again")


def easy_vqa_rows(parts: pathlib.Path, output: pathlib.Path, split: str) -> list[dict]:
    """Write the pictures of a split of easy-VQA to OUTPUT/easy-SPLIT; return its rows as training reads them."""
    folder = f"easy-{split}"
    (output / folder).mkdir(exist_ok=True)
    with zipfile.ZipFile(parts / EASY_VQA) as wheel:
        questions = json.loads(wheel.read(f"easy_vqa/data/{split}/questions.json"))
        for picture in sorted({picture for _, _, picture in questions}):
            content = wheel.read(f"easy_vqa/data/{split}/images/{picture}.png")
            (output / folder / f"{picture}.png").write_bytes(content)
    return [
        {"prompt": f"<image>{question}", "answer": answer, "images": [f"{folder}/{picture}.png"]}
        for question, answer, picture in questions
    ]


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write a row to each line of a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rows(parts: pathlib.Path, output: pathlib.Path) -> None:
    """Write the rows for SFT (see.jsonl), for GRPO (sums.jsonl, easy.jsonl), and those to test with (…-test.jsonl)."""
    rng = np.random.default_rng(0)
    held_out, others = pairs_of_numbers(rng)
    reading = write_drawn(output, "reading", reading_rows(others, rng), seed=1)
    for name, pairs, seed in (("sums", others[:SUMS], 2), ("sums-test", held_out, 3)):
        rows = ((pair, SUM, str(sum(pair))) for pair in pairs.tolist())
        write_jsonl(output / f"{name}.jsonl", write_drawn(output, name, rows, seed))
    tests = ((pair, QUESTIONS[0][0], QUESTIONS[0][1].format(*pair)) for pair in held_out.tolist())
    write_jsonl(output / "reading-test.jsonl", write_drawn(output, "reading-test", tests, seed=4))
    easy = easy_vqa_rows(parts, output, "train")
    write_jsonl(output / "easy.jsonl", easy)
    write_jsonl(output / "easy-test.jsonl", easy_vqa_rows(parts, output, "test"))
    write_jsonl(output / "reading.jsonl", reading)
    write_jsonl(output / "see.jsonl", [*reading, *easy])
