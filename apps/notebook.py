"""Train from Python, such as in a notebook; docs/extend.md has an example."""

import pathlib
import signal
from typing import Any

import grpo
from common.files import read_jsonl


def train(**flags: Any) -> list[dict[str, Any]]:
    """Train as `grpo.py` does with `flags`; return the metrics of each step (docs/metrics.md).

    Ctrl-C saves and stops the run; afterwards, it means what it did before. Raises ValueError for a flag's value,
    UserError for another mistake, and RunStopped for a run that ends early.
    """
    cfg = grpo.Config(**flags)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        grpo.main(cfg)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return read_jsonl(pathlib.Path(cfg.output) / "metrics.jsonl")
