"""Parquet files, folders that `datasets` saved or can read, and data sets on the hub; images stay where they are."""

import glob
import json
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from common import hub
from common.errors import UserError
from common.records import Cell
from inputs.rows import SAVED, Locate, split_config

if TYPE_CHECKING:  # imported only where it is used: the import takes a second
    import datasets

CODED = re.compile("ClassLabel|Json|float16|float32")  # features whose cells are not what they mean; see `_decoded`


def open_table(name: str, split: str | None, default_split: str) -> "datasets.Dataset":
    """Open a parquet file, a folder that `datasets` saved or can read, or a data set on the hub.

    The rows of the result are in Arrow format. When `split` is None and there are several splits, `default_split` is
    opened.
    """
    path, config = split_config(name)
    offline = not path.exists() and hub.go_offline_if_unreachable()
    import datasets  # after the line above, whose result it reads once

    try:
        loaded = _load(path, config, offline)
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps an error of a file's reader
        reason = str(cause).strip().partition("\n")[0][:160]
        problem = f"no data at {name!r}: not a local path, and not on the hub or the hub cannot be reached"
        if path.exists():
            problem = f"no data in {name!r}: `datasets` cannot read it and it has no main.csv"
        raise UserError(f"{problem} ({type(cause).__name__}: {reason})") from error
    splits = loaded
    if isinstance(loaded, datasets.Dataset):  # a single split, which may have no name
        splits = {str(loaded.split or default_split): loaded, default_split: loaded}
    if split is None:
        split = default_split if default_split in splits or len(splits) > 1 else next(iter(splits))
    requested, present = split.split("+"), ", ".join(splits)
    if missing := ", ".join(part for part in requested if part not in splits):
        raise UserError(f"{name!r} has no split {missing}; it has {present}: write {name}@SPLIT")
    return datasets.concatenate_datasets([splits[part] for part in requested]).with_format("arrow")


def _load(path: pathlib.Path, config: str | None, offline: bool) -> "datasets.Dataset | datasets.DatasetDict":
    """Load what is at `path`, a file, a folder or a name on the hub. Raises UserError, or what `datasets` raises."""
    import datasets
    from pyarrow import parquet

    for file in [path] if path.is_file() else path.rglob("*.parquet"):
        if parquet.read_metadata(file).num_rows == 0:  # `datasets` cannot read it, neither alone nor beside others
            raise UserError(f"{file}: no usable row: the file has none; remove it")
    if path.is_file():
        return datasets.Dataset.from_parquet(glob.escape(str(path)))
    if any((path / name).is_file() for name in SAVED):
        return datasets.load_from_disk(str(path))
    source = (hub.cached_dataset(str(path)) if offline else None) or str(path)
    try:
        return datasets.load_dataset(source, config)
    except ValueError as error:
        if not str(error).startswith("Config name is missing"):
            raise
        configs = ", ".join(datasets.get_dataset_config_names(source))
        raise UserError(f"{path} has several configurations ({configs}): write {path}:CONFIG") from None


def table_rows(table: "datasets.Dataset", name: str, locate: Locate) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a table with a `Cell` for each image. Images are counted without being read."""
    from pyarrow import ListScalar

    coded = {column for column, feature in table.features.items() if CODED.search(repr(feature))}
    for start in range(0, len(table), 1000):
        batch = table[start : start + 1000]
        image_columns = [field.name for field in batch.schema if _holds_images(field.type)]
        for i, row in enumerate(batch.drop_columns(image_columns).to_pylist()):
            row |= {column: _decoded(row[column], table.features[column]) for column in coded & row.keys()}
            for column in image_columns:
                cell = batch.column(column)[i]
                row[column] = Cell(table, start + i, column, None, locate) if cell.is_valid else None
                if cell.is_valid and isinstance(cell, ListScalar):
                    row[column] = [Cell(table, start + i, column, index, locate) for index in range(len(cell.values))]
            yield f"{name} row {start + i + 1}", row


def _decoded(value: Any, feature: Any) -> Any:
    """Return what a cell of this feature means: the name of a class, a float32 as it is written, an object in JSON.

    A class without a name, such as the -1 of rows without labels, is None.
    """
    if value is None or isinstance(feature, dict):
        return value and {name: _decoded(value[name], part) for name, part in feature.items()}
    if hasattr(feature, "feature"):  # a list
        return [_decoded(item, feature.feature) for item in value]
    if hasattr(feature, "names"):
        return dict(enumerate(feature.names)).get(value)
    if type(feature).__name__ == "Json":
        return json.loads(value)
    return float(str(np.dtype(feature.dtype).type(value))) if CODED.search(feature.dtype) else value


def _holds_images(arrow_type: Any) -> bool:
    """Return whether a column of this Arrow type holds images: {bytes, path}, bytes, or a list of either."""
    image_type = getattr(arrow_type, "value_type", arrow_type)
    return str(image_type) in ("binary", "large_binary") or "bytes" in getattr(image_type, "names", ())
