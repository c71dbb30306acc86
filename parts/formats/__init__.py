"""Data sets of every format but plain JSON rows and folders with main.csv.

Imports `common`, `config`, `grading` and `inputs`. `inputs/rows.py` asks for it, by a row or a file that is not plain.
Start reading at `rows.py`, which asks `beside.py` (reasoning, tools, earlier turns), `choices.py`, `encoded.py`
(base64) and `places.py` (boxes, points); `tables.py` opens Parquet files and data sets of the hub, `zips.py` ZIP files.
"""

import functools
import pathlib
from collections.abc import Iterator

from config import Columns
from inputs.rows import Locate, RowError, counting_rows, locate_image, split_config
from parts.formats.rows import as_sample, split_rows
from parts.formats.tables import open_table, table_rows
from parts.formats.zips import open_zip

__all__ = ["as_sample", "open_rows", "open_table", "open_zip", "split_rows"]


def open_rows(
    spec: str, name: str, split: str | None, default_split: str, folder: pathlib.Path, columns: Columns
) -> tuple[Iterator[tuple[str, dict | RowError]], Locate]:
    """Return the rows of a ZIP or a table, and what finds their images: in the ZIP, or in `folder`.

    `name`, `split`: those that `spec`, an entry of `--data`, names; for `default_split`, see `inputs.rows.raw_rows`.
    """
    path, _ = split_config(name)
    if path.is_file() and path.suffix.lower() == ".zip":
        root, locate = open_zip(path)
        return counting_rows(root / "main.csv", columns), locate
    locate = functools.partial(locate_image, (folder, path))
    return table_rows(open_table(name, split, default_split), spec, locate), locate
