"""Named benchmarks, intervals, figures, saved predictions and a model beside its baseline: flags of evaluate.py.

Imports the core; evaluate.py imports it. Start reading at `table.py`, which defines the prompt of each benchmark and
judges its rows. `scores.py` has bootstrap intervals and compares two models, `figures.py` draws, and `lmms_eval.py`
prints the command that scores a run in lmms-eval. `saved.py` reads saved predictions, `blind.py` takes pictures away.
"""

import functools
from typing import Any

from common.records import Sample
from evaluation.predictions import Judge
from parts.benchmarks.figures import draw_scores
from parts.benchmarks.saved import read_predictions
from parts.benchmarks.scores import Baseline, BenchmarkJudge, mean_interval

__all__ = ["Baseline", "BenchmarkJudge", "draw_scores", "mean_interval", "prepare", "read_predictions"]


def prepare(cfg: Any) -> tuple[Judge, Baseline | None, tuple[list[Sample], list[dict]] | None]:
    """Return what judges the rows, the baseline, and the rows of saved predictions, as the flags of evaluate.py ask."""
    judge = BenchmarkJudge(cfg) if cfg.benchmark else Judge(cfg)
    if cfg.picture:
        from parts.benchmarks.blind import check_baseline, swap_pictures

        check_baseline(cfg)
        judge.swap_pictures = functools.partial(swap_pictures, cfg)
    baseline = Baseline(cfg, judge) if cfg.baseline else None
    return judge, baseline, read_predictions(cfg.predictions, judge) if cfg.predictions else None
