"""The commands of data.py: `rows.py` converts and shows rows, `overlap.py` compares two data sets.

Imports the core. With a fraction as `--eval_data`, a run asks for `hold_out`; with rows, for `log_shared`, and it does
without if this part is not here. Start reading at `rows.py`.
"""

import sys
from typing import Any

from common import cli
from config import with_recipe
from parts.convert.overlap import OverlapFlags, hold_out, log_shared, overlap
from parts.convert.rows import Config, ShowFlags, convert, show

__all__ = ["Config", "OverlapFlags", "ShowFlags", "convert", "hold_out", "launch", "log_shared", "overlap", "show"]


def main(cfg: Any) -> None:
    if cfg.command == "convert":
        print(f"{cfg.output_jsonl}: {convert(cfg)} rows")
    else:
        print(show(cfg) if cfg.command == "show" else overlap(cfg))


def launch() -> None:
    """Parse the command line of data.py, and run its command."""
    if sys.argv[1:2] == ["show"]:
        cli.launch("parts.convert", ShowFlags, with_recipe)
    cli.launch("parts.convert", OverlapFlags if sys.argv[1:2] == ["overlap"] else None)
