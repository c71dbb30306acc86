"""The training rows of `./run.sh click`: UI-R1's 136, as rows of this project.

    python -m recipes.click_rows --output runs/click                      # downloads LZXzju/UI-R1-3B-Train
    python -m recipes.click_rows --output runs/click --input FOLDER       # with its train.json and train_imgs/

UI-R1's own code (grpo_json_action_coord.py) reads `img_filename` and `instruction`, and `bbox`, the edges of what is to
be clicked on in pixels of the file, or `action`. A row with a box is a click.
"""

import json
import os
import pathlib
from dataclasses import dataclass

from common import cli
from common.errors import UserError
from common.files import atomic_write, json_lines

SOURCE = "LZXzju/UI-R1-3B-Train"


@dataclass
class Config:
    """Write UI-R1's training rows as rows of this project."""

    output: str
    """Folder for train.jsonl."""
    input: str | None = None
    """Folder with train.json and train_imgs/; by default, it is downloaded from the hub."""


def as_row(row: dict, number: int, images: pathlib.Path) -> dict:
    """Return a row of train.json as a row of this project. Raises UserError if a column is missing."""
    if missing := [name for name in ("img_filename", "instruction") if not isinstance(row.get(name), str)]:
        raise UserError(f"train.json row {number}: no text under {missing[0]!r} (columns: {', '.join(row)})")
    if "bbox" not in row and not isinstance(row.get("action"), str):
        raise UserError(f"train.json row {number}: neither 'bbox' nor 'action' (columns: {', '.join(row)})")
    path = os.path.abspath(images / row["img_filename"])
    plain = {"prompt": row["instruction"], "images": [path], "answer": "click" if "bbox" in row else row["action"]}
    return plain | ({"bbox": row["bbox"], "coordinates": "file"} if "bbox" in row else {})


def download() -> str:
    """Return the folder of the data set on the hub, from its cache if it is there."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(SOURCE, repo_type="dataset")
    except (OSError, ValueError) as error:  # what the hub's own errors are
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"{SOURCE} cannot be downloaded ({reason}): give its folder as --input, or rows as DATA"
        ) from None


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.input or download())
    try:
        rows = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/train.json cannot be read ({error}): is --input the folder of {SOURCE}?") from None
    lines = [as_row(row, number, folder / "train_imgs") for number, row in enumerate(rows, 1)]
    output = pathlib.Path(cfg.output) / "train.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(output, json_lines(lines))
    print(f"{output}: {len(lines)} rows, {sum('bbox' in line for line in lines)} of them clicks")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
