"""Named benchmarks, intervals, figures, saved predictions and a model beside its baseline: flags of evaluate.py.

Imports the core; evaluate.py imports it. Start reading at `table.py`, which defines the prompt of each benchmark and
judges its rows. `scores.py` has bootstrap intervals and compares two models, `figures.py` draws, and `lmms_eval.py`
prints the command that scores a run in lmms-eval. `saved.py` reads saved predictions, `blind.py` takes pictures away.
"""

import functools
import pathlib
from typing import Any

from common import console
from common.records import Sample
from evaluation.held_out import PROGRESS
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
    saved = read_predictions(cfg.predictions, judge) if cfg.predictions else None
    if saved:
        _keep_progress(pathlib.Path(cfg.output))
    if baseline and baseline.is_saved:
        _keep_progress(pathlib.Path(cfg.output, "baseline"))
    return judge, baseline, saved


def _keep_progress(folder: pathlib.Path) -> None:
    """Rename what an interrupted evaluation has sampled, which one that samples nothing would delete at its end."""
    path = folder / PROGRESS
    if console.is_main() and path.is_file():
        path.rename(path.with_suffix(".old"))
        console.log(f"note: {path.with_suffix('.old')} has the responses of an evaluation that was interrupted")
