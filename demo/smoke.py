"""What `./run.sh RECIPE --smoke` trains on: a tiny model with random weights and a few generated rows in the recipe's
real data format. It shows that a recipe's commands run on this machine, and teaches nothing.

    python -m demo.smoke --recipe vqa      # conversations JSONL as of VQA-RAD, beside images/
    python -m demo.smoke --recipe math     # text: parquet as veRL and Skywork-OR1 have it; image: saved by `datasets`
    python -m demo.smoke --recipe count    # a ZIP with main.csv and images/
"""

import json
import pathlib
import shutil
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.cli import run
from demo import tiny

ROWS = 8


@dataclass
class Config:
    """Write a tiny model and a recipe's data."""

    recipe: Literal["vqa", "math", "count"]
    """Whose data to write."""
    output: str
    """Folder for model/ and the data; what is in it is replaced."""
    seed: int = 0
    """Seed of the weights and the pictures."""


def write_vqa(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """train.jsonl and test.jsonl: one conversation a row, the answer in the assistant's turn."""
    (folder / "images").mkdir()
    for name in ("train", "test"):
        rows = []
        for i in range(ROWS):
            count = int(rng.integers(1, 5))
            image = f"images/{name}-{i}.png"
            tiny.draw_shapes(count, "circle", rng).save(folder / image)
            question, answer = [("Is there more than one?", "yes" if count > 1 else "no"), ("How many?", count)][i % 2]
            user = [{"type": "image", "image": image}, {"type": "text", "text": f"Question: {question}"}]
            reply = [{"type": "text", "text": f"Answer: {answer}"}]
            turns = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
            rows.append(json.dumps({"conversations": turns}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def write_math(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """text.parquet, chat prompts with the gold as the text of a list; image/, a data set with its pictures inside."""
    import datasets

    datasets.disable_progress_bars()
    rows = []
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
    counts = rng.integers(1, 7, ROWS).tolist()
    pictures = [[tiny.draw_shapes(count, "square", rng)] for count in counts]
    problems = ["<image>How many squares are there, squared?"] * ROWS
    columns = {"images": pictures, "problem": problems, "answer": [f"${count}^2$" for count in counts]}
    kind = datasets.Features(
        images=datasets.List(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
    )
    datasets.Dataset.from_dict(columns, features=kind).save_to_disk(str(folder / "image"))


def write_count(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """train.zip and test.zip, as people upload them."""
    for name in ("train", "test"):
        tiny.write_shapes(folder / name, ROWS, rng.integers(1000, size=2).tolist())
        shutil.make_archive(str(folder / name), "zip", folder / name)
        shutil.rmtree(folder / name)


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.output)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write = {"vqa": write_vqa, "math": write_math, "count": write_count}[cfg.recipe]
    write(folder, np.random.default_rng(cfg.seed))
    tokenizer = tiny.byte_tokenizer()
    tiny.save(tiny.build_model(tokenizer, cfg.seed), tokenizer, folder / "model")
    print(f"{folder}: a tiny model with random weights and {ROWS} rows")


if __name__ == "__main__":
    run(main, Config)
