"""`BENCHMARKS`, `Benchmark`, `judge_integer` and so on, for plugins: the names of parts/benchmarks/table.py."""

from typing import Any


def __getattr__(name: str) -> Any:
    from parts.benchmarks import table

    return getattr(table, name)
