"""The table of benchmarks and what its entries are made of, for plugins: `BENCHMARKS`, `Benchmark`, `judge_integer`, …

They are in parts/benchmarks/table.py, which is imported when the first of these names is.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    from parts.benchmarks import table

    return getattr(table, name)
