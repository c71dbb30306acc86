"""How long 20,000 rows take to load and check, and how much memory: JPEGs named by path in an EasyR1 file.

python bench/load.py --model runs/tiny/count-0/model
"""

import json
import pathlib
import resource
import sys
import time
from dataclasses import dataclass

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cli
from data import load_processor, load_samples


@dataclass
class Config:
    """Measure the loading of rows."""

    model: str
    """Whose tokenizer and image limits prompt lengths are counted with."""
    rows: int = 20000
    """How many rows."""
    folder: str = "runs/bench/rows"
    """Where the rows and pictures are written, once."""


def make_rows(folder: pathlib.Path, rows: int) -> str:
    """Questions about `rows` different pictures of 448x336."""
    path = folder / f"{rows}.jsonl"
    if path.is_file():
        return str(path)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng, lines = np.random.default_rng(0), []
    for i in tqdm(range(rows), "writing pictures", delay=3, disable=None):
        noise = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).resize((448, 336), Image.Resampling.BILINEAR)
        picture.save(folder / "images" / f"{i}.jpg", quality=90)
        question = f"<image>Question number {i}: what is shown in this picture, and how many of them in total?"
        lines.append(json.dumps({"prompt": question, "answer": str(i % 7), "images": [f"images/{i}.jpg"]}) + "\n")
    path.write_text("".join(lines))
    return str(path)


def main(cfg: Config) -> None:
    path = make_rows(pathlib.Path(cfg.folder), cfg.rows)
    processor = load_processor(cfg.model, "count")
    for name, options in (("checked", {}), ("with prompt lengths", dict(processor=processor, max_prompt_length=2048))):
        begun = time.perf_counter()
        samples = load_samples(path, "count", **options)
        seconds, memory = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{len(samples)} rows {name}: {seconds:.1f} s, {memory:.2f} GiB in all")


if __name__ == "__main__":
    cli.run(main, Config)
