"""Data sets of every format but plain JSON rows and folders with main.csv.

Imports `common`, `config` and `inputs`. `inputs/rows.py` asks for it, by a row or a file that is not plain. Start
reading at `rows.py`; `tables.py` opens Parquet files and data sets of the hub, `zips.py` ZIP files.
"""

from parts.formats.rows import as_sample, split_rows
from parts.formats.tables import open_table, table_rows
from parts.formats.zips import open_zip

__all__ = ["as_sample", "open_table", "open_zip", "split_rows", "table_rows"]
