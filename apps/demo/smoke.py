"""Write a tiny model and data for `./run.sh RECIPE --smoke`.

    python -m apps.demo.smoke --recipe vqa --output FOLDER    # conversations JSONL as in VQA-RAD, next to images/
    python -m apps.demo.smoke --recipe geo3k --output FOLDER  # EasyR1 JSONL, next to images/
    python -m apps.demo.smoke --recipe math --output FOLDER   # text: parquet as in Skywork-OR1; image: a saved data set
    python -m apps.demo.smoke --recipe click --output FOLDER  # rows with boxes, and test rows as in ScreenSpot
    python -m apps.demo.smoke --recipe clevr --output FOLDER  # rows as in R1-V, next to images/
    python -m apps.demo.smoke --recipe count --output FOLDER  # ZIP files with main.csv and images/

The model has random weights. The data consists of a few generated rows in the recipe's real format. A smoke run shows
that the recipe's commands work on this machine; the model learns nothing useful.
"""

import json
import pathlib
import shutil
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from apps.demo import tiny
from common import cli
from common.errors import UserError

ROWS = 8
WRITTEN = {"model", "train.jsonl", "test.jsonl", "images", "text.parquet", "image", "train.zip", "test.zip"}


@dataclass
class Config:
    """Write a tiny model and a few rows of a recipe's data."""

    recipe: Literal["vqa", "geo3k", "math", "count", "click", "clevr"]
    """Recipe to write data for."""
    output: str
    """Folder for model/ and the data. What an earlier call has written there is replaced."""


def write_vqa(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write train.jsonl and test.jsonl. Each row is a conversation; the assistant's turn is the answer."""
    (folder / "images").mkdir()
    for name in ("train", "test"):
        rows = []
        for i in range(ROWS):
            count, image = int(rng.integers(1, 5)), f"images/{name}-{i}.png"
            tiny.draw_shapes(count, "circle", rng).save(folder / image)
            question, answer = [("Is there more than one?", "yes" if count > 1 else "no"), ("How many?", count)][i % 2]
            user = [{"type": "image", "image": image}, {"type": "text", "text": f"Question: {question}"}]
            reply = [{"type": "text", "text": f"Answer: {answer}"}]
            turns = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
            rows.append(json.dumps({"conversations": turns}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))


def write_geo3k(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write train.jsonl and test.jsonl with rows as in Geometry3K."""
    (folder / "images").mkdir()
    for name in ("train", "test"):
        rows = []
        for i, count in enumerate(rng.integers(1, 7, ROWS).tolist()):
            image = f"images/{name}-{i}.png"
            tiny.draw_shapes(count, "square", rng).save(folder / image)
            row = {"images": [image], "problem": "<image>How many squares?", "answer": f"{count}"}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))


def write_math(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write text.parquet, whose gold answers are lists stored as text, and image/, a saved data set with images."""
    import datasets

    rows: list[dict] = []
    for a, b in rng.integers(2, 20, (ROWS, 2)).tolist():
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is ${a} + \\frac{{{b}}}{{2}}$?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": json.dumps([f"\\frac{{{2 * a + b}}}{{2}}"])},
                "extra_info": {"index": len(rows), "split": "train"},
            }
        )
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "text.parquet"))
    rows = []
    for count in rng.integers(1, 7, ROWS).tolist():
        images, problem = [tiny.draw_shapes(count, "square", rng)], "<image>How many squares are there, squared?"
        rows.append({"images": images, "problem": problem, "answer": f"${count}^2$"})
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "image"))


def write_click(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write train.jsonl with clicks and another action, as recipes/click_rows.py does, and test.jsonl as ScreenSpot."""
    (folder / "images").mkdir()
    for name in ("train", "test"):
        rows = []
        for i in range(ROWS):
            (x, y), image = rng.integers(0, 60, 2).tolist(), f"images/{name}-{i}.png"
            screen, box = Image.new("RGB", (84, 84), "white"), [x, y, x + 24, y + 24]
            screen.paste((30, 90, 200), (x, y, x + 24, y + 24))
            screen.save(folder / image)
            row: dict = {"prompt": "open the blue square", "images": [image], "answer": "click", "bbox": box}
            row |= {"coordinates": "file"}
            if name == "test":
                row = {"instruction": row["prompt"], "image": image, "bbox": [edge / 84 for edge in box]}
                row |= {"file_name": image, "data_type": ["icon", "text"][i % 2], "data_source": "android"}
            elif i % 4 == 3:
                row = {"prompt": "go back", "images": [image], "answer": "navigate_back"}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))


def write_clevr(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write train.jsonl and test.jsonl with rows as in CLEVR-CoGenT: a count or yes or no, between tags."""
    (folder / "images").mkdir()
    for name in ("train", "test"):
        rows = []
        for i, count in enumerate(rng.integers(1, 7, ROWS).tolist()):
            image = f"images/{name}-{i}.png"
            tiny.draw_shapes(count, "circle", rng).save(folder / image)
            asked, answer = [
                ("How many items are there?", count),
                ("Is one thing alone?", "yes" if count == 1 else "no"),
            ][i % 2]
            rows.append(
                json.dumps({"image": image, "problem": asked, "solution": f"<answer> {answer} </answer>"}) + "\n"
            )
        (folder / f"{name}.jsonl").write_text("".join(rows))


def write_count(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Write train.zip and test.zip, in the format that users upload."""
    for name in ("train", "test"):
        tiny.write_shapes(folder / name, ROWS, rng.integers(1000, size=2).tolist())
        shutil.make_archive(str(folder / name), "zip", folder / name)
        shutil.rmtree(folder / name)


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.output)
    if others := sorted(path.name for path in folder.glob("*") if path.name not in WRITTEN):
        raise UserError(f"--output {cfg.output!r} holds something else ({others[0]}): choose a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write = {"vqa": write_vqa, "geo3k": write_geo3k, "math": write_math, "count": write_count}
    write |= {"click": write_click, "clevr": write_clevr}
    write[cfg.recipe](folder, np.random.default_rng(0))
    tokenizer = tiny.byte_tokenizer()
    tiny.save(tiny.build_model(tokenizer, seed=0), tokenizer, folder / "model")
    print(f"{folder}: wrote a tiny model with random weights, and {ROWS} rows per data set")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
