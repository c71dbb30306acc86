"""Pictures and rows for the model of `vlm.py`: two shapes drawn here, and easy-VQA's shapes and colors.

The rows to read with, and those of easy-VQA's training split, are for SFT: they ask what is in a picture, and for
nothing else. The rows for GRPO name a price for each shape, and ask what the two in the picture cost together: the
prices are in the text alone, and which of them count is in the picture alone.
"""

import hashlib
import json
import math
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from common import console
from common.errors import UserError

EASY_VQA = "easy_vqa-1.0-py3-none-any.whl"  # Victor Zhou, MIT License
SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
SIZE = 112  # side of a picture in pixels: 16 image tokens, and one window of the vision tower
FINER = 4  # times as fine as the picture: what is drawn is scaled down, so that edges are smooth
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLORS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "yellow": (235, 200, 30),
    "purple": (140, 50, 170),
    "black": (25, 25, 25),
}
RADII = (14, 25)  # of a shape in pixels
PRICES = (2, 50)  # the lowest, and above the highest
READING, COSTS, HELD_OUT = 16384, 4096, 512  # numbers of pictures
QUESTIONS = (  # what SFT asks about a picture: shapes and colors, from left to right
    ("Which two shapes are in the picture, from left to right?", "{0} and {1}"),
    ("Which shape is on the left?", "{0}"),
    ("Which shape is on the right?", "{1}"),
    ("Which color is the shape on the left?", "{2}"),
    ("Which color is the shape on the right?", "{3}"),
    ("What is in the picture?", "a {2} {0} and a {3} {1}"),
)
QUESTIONS_EACH = 2  # about a picture
COST = "What do the two shapes in the picture cost together?"

Scene = tuple[str, str, str, str]  # the shapes on the left and on the right, and their colors


def draw_scene(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Return a picture of two shapes beside each other on pale ground, of any size and height, slightly turned."""
    ground, side = rng.integers(215, 256, 3), SIZE * FINER
    image = Image.new("RGB", (side, side), tuple(ground.tolist()))
    draw = ImageDraw.Draw(image)
    for i, (shape, color) in enumerate(zip(scene[:2], scene[2:])):
        radius = int(rng.integers(*RADII))
        x = i * SIZE / 2 + rng.uniform(radius + 2, SIZE / 2 - radius - 1)
        y = rng.uniform(radius + 2, SIZE - radius - 2)
        fill = np.clip(np.array(COLORS[color]) + rng.integers(-20, 21, 3), 0, 255)
        corners = outline(shape, rng.uniform(-0.25, 0.25)) * radius + (x, y)
        draw.polygon([tuple(corner) for corner in (corners * FINER).tolist()], fill=tuple(fill.tolist()))
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def outline(shape: str, turn: float) -> np.ndarray:
    """Return the corners (n, 2) of a shape within a circle of radius 1 around 0, turned by `turn` radians."""
    up, radii = -math.pi / 2, [1.0]
    match shape:
        case "circle":
            corners = 40
        case "square":
            corners, up = 4, math.pi / 4
        case "triangle":
            corners = 3
        case "star":
            corners, radii = 10, [1.0, 0.4]
        case _:  # a cross: of four arms, each with two outer corners and one between it and the next
            wide = math.atan2(0.3, 0.95)
            angles = [k * math.pi / 2 + each for k in range(4) for each in (-wide, wide, math.pi / 4)]
            lengths = [1.0, 1.0, 0.3 * math.sqrt(2)] * 4
            return np.array([(r * math.cos(a + turn), r * math.sin(a + turn)) for a, r in zip(angles, lengths)])
    angles = [up + turn + 2 * math.pi * k / corners for k in range(corners)]
    return np.array([(math.cos(a), math.sin(a)) for a in angles]) * np.resize(radii, corners)[:, None]


def random_scenes(number: int, rng: np.random.Generator) -> list[Scene]:
    """Return `number` scenes, of any two shapes and colors."""
    return [(*rng.choice(SHAPES, 2).tolist(), *rng.choice([*COLORS], 2).tolist()) for _ in range(number)]


def reading_rows(scene: Scene, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Yield questions about a scene and their answers."""
    for i in rng.choice(len(QUESTIONS), QUESTIONS_EACH, replace=False):
        question, answer = QUESTIONS[i]
        yield question, answer.format(*scene)


def cost_row(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Return a list of prices with the question what both shapes cost, and the answer."""
    prices = dict(zip(rng.permutation(SHAPES).tolist(), rng.choice(np.arange(*PRICES), len(SHAPES), False).tolist()))
    listed = [f"a {shape} costs {price}" for shape, price in prices.items()]
    text = f"{', '.join(listed[:-1])} and {listed[-1]}. {COST}"
    return text[0].upper() + text[1:], str(prices[scene[0]] + prices[scene[1]])


def write_drawn(output: pathlib.Path, name: str, scenes: list[Scene], seed: int) -> list[str]:
    """Draw the picture of each scene to OUTPUT/NAME; return the files."""
    rng, written = np.random.default_rng(seed), []
    (output / name).mkdir(exist_ok=True)
    for i, scene in enumerate(console.progress(scenes, f"drawing {name}", unit="picture")):
        written.append(f"{name}/{i:05d}.png")
        draw_scene(scene, rng).save(output / written[-1])
    return written


def row_of(file: str, question: str, answer: str) -> dict[str, Any]:
    """Return a row as training reads it."""
    return {"prompt": f"<image>{question}", "answer": answer, "images": [file]}


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
    return [row_of(f"{folder}/{picture}.png", question, answer) for question, answer, picture in questions]


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write a row to each line of a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rows(parts: pathlib.Path, output: pathlib.Path) -> None:
    """Write the rows for SFT (see.jsonl), for GRPO (costs.jsonl, easy.jsonl), and those to test with (…-test.jsonl)."""
    rng = np.random.default_rng(0)
    for seed, (name, number) in enumerate({"reading": READING, "costs": COSTS, "costs-test": HELD_OUT}.items()):
        scenes = random_scenes(number, rng)
        drawn = [*zip(write_drawn(output, name, scenes, seed), scenes)]
        if name == "reading":
            reading = [row_of(file, *row) for file, scene in drawn for row in reading_rows(scene, rng)]
        else:
            write_jsonl(output / f"{name}.jsonl", [row_of(file, *cost_row(scene, rng)) for file, scene in drawn])
    question, answer = QUESTIONS[0]  # about the last pictures
    write_jsonl(output / "reading-test.jsonl", [row_of(file, question, answer.format(*scene)) for file, scene in drawn])
    easy = easy_vqa_rows(parts, output, "train")
    write_jsonl(output / "easy.jsonl", easy)
    write_jsonl(output / "easy-test.jsonl", easy_vqa_rows(parts, output, "test"))
    write_jsonl(output / "see.jsonl", [*reading, *easy])
