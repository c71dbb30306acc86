"""Redraw a run's pages: `python -m parts.pages --run runs/x`."""

import pathlib
from dataclasses import dataclass

from common import cli
from common.errors import UserError
from parts.pages.report import write_pages


@dataclass
class Config:
    """Redraw a run's curves and completions page."""

    run: str
    """Folder of the run."""


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.run)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {cfg.run!r}: pass the folder that grpo.py wrote (its --output)")
    if problems := write_pages(folder):
        raise UserError(problems[0])


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
