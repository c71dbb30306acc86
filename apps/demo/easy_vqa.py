"""Rows for the model of `vlm.py`: what is in the pictures of easy-VQA, its own questions, and what the shapes cost.

easy-VQA (Victor Zhou, MIT License) asks about the shape in a picture and its color, one word an answer. The tower
learns to see by SFT on captions: a color and a shape in one answer, where most of the questions are about yes or no.
For GRPO, a text names a price for each shape and each color, and asks what the one in the picture costs. What counts is
in the picture alone, and its price in the text alone.
"""

import hashlib
import json
import pathlib
import zipfile
from typing import Any

import numpy as np

from common import console
from common.errors import UserError

PACKAGE = "easy_vqa-1.0-py3-none-any.whl"
SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
SHAPES = ("circle", "rectangle", "triangle")
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
PRICES = (2, 50)  # the lowest, and above the highest
PRICES_EACH = {"train": 3, "test": 1}  # lists of prices for a picture
CAPTION = ("What is in the picture?", "A {} {}.")  # a question, and the answer with a color and a shape
TOLD = "The picture shows a {} {}. "  # in place of a picture
ONE_WORD = "Answer with one word."
PRICE = "What is in the picture, and what does it cost? Answer as in: A pink square. 3 + 4 = 7."

Question = tuple[str, str, int]  # the question, its answer, and the number of the picture


def check_package(parts: pathlib.Path) -> None:
    """Raise UserError unless the folder `parts` has easy-VQA as it was published."""
    package = parts / PACKAGE
    if not package.is_file():
        raise UserError(f"{package}: missing; download it with the model's packages")
    if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{package}: not the published package; download it again")


def read_split(parts: pathlib.Path, output: pathlib.Path, split: str) -> list[Question]:
    """Write the pictures of a split to OUTPUT/SPLIT; return its questions."""
    (output / split).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(parts / PACKAGE) as wheel:
        questions = json.loads(wheel.read(f"easy_vqa/data/{split}/questions.json"))
        pictures = sorted({picture for _, _, picture in questions})
        for picture in console.progress(pictures, f"pictures of {split}", unit="picture"):
            content = wheel.read(f"easy_vqa/data/{split}/images/{picture}.png")
            (output / split / f"{picture}.png").write_bytes(content)
    return questions


def shapes_and_colors(questions: list[Question]) -> dict[int, tuple[str, str]]:
    """Return the shape and the color of each picture of which the questions say both."""
    shapes: dict[int, str] = {}
    colors: dict[int, str] = {}
    for question, answer, picture in questions:
        if answer in COLORS:
            colors[picture] = answer
        for shape in SHAPES:
            if answer == shape or (answer in COLORS and shape in question):  # "what color is the circle?"
                shapes[picture] = shape
    return {picture: (shapes[picture], colors[picture]) for picture in sorted(shapes.keys() & colors.keys())}


def price_question(shape: str, color: str, rng: np.random.Generator) -> tuple[str, str]:
    """Return a list of prices with the question what a shape of this color costs, and the answer."""
    prices = dict(zip((*SHAPES, *COLORS), rng.integers(*PRICES, len(SHAPES) + len(COLORS)).tolist()))
    shapes, colors = (", ".join(f"{x} {prices[x]}" for x in rng.permutation(names)) for names in (SHAPES, COLORS))
    return f"Shapes: {shapes}. Colors: {colors}. {PRICE}", str(prices[shape] + prices[color])


def write_rows(parts: pathlib.Path, output: pathlib.Path) -> None:
    """Write the rows of both splits: OUTPUT/captions-SPLIT.jsonl, easy-SPLIT.jsonl and prices-SPLIT.jsonl.

    told-SPLIT.jsonl has the questions about prices without pictures, with what they show in words.
    """
    for seed, split in enumerate(("train", "test")):
        questions, rng = read_split(parts, output, split), np.random.default_rng(seed)
        known = shapes_and_colors(questions)
        question, answer = CAPTION
        captions = [
            row_of(split, question, answer.format(color, shape), picture) for picture, (shape, color) in known.items()
        ]
        priced = [
            (*price_question(*what, rng), picture) for picture, what in known.items() for _ in range(PRICES_EACH[split])
        ]
        told = [
            {"prompt": TOLD.format(*reversed(known[picture])) + question, "answer": price}
            for question, price, picture in priced
        ]
        # a capital, as in the answers that the language model gives by itself
        easy = [
            row_of(split, f"{text} {ONE_WORD}", answer.capitalize(), picture) for text, answer, picture in questions
        ]
        write_jsonl(output / f"captions-{split}.jsonl", captions)
        write_jsonl(output / f"easy-{split}.jsonl", easy)
        write_jsonl(output / f"prices-{split}.jsonl", [row_of(split, *each) for each in priced])
        write_jsonl(output / f"told-{split}.jsonl", told)


def row_of(split: str, question: str, answer: str, picture: int) -> dict[str, Any]:
    """Return a row as training reads it."""
    return {"prompt": f"<image>{question}", "answer": answer, "images": [f"{split}/{picture}.png"]}


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write a row to each line of a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
