"""Named benchmarks, intervals, figures and a model beside its baseline: `--benchmark` and `--baseline` of evaluate.py.

Imports the core; evaluate.py imports it. Start reading at `table.py`, which defines the prompt of each benchmark and
judges its rows. `scores.py` has bootstrap intervals and compares two models, `figures.py` draws, and `lmms_eval.py`
prints the command that scores a run in lmms-eval.
"""

from parts.benchmarks.figures import draw_scores
from parts.benchmarks.scores import Baseline, BenchmarkJudge, mean_interval

__all__ = ["Baseline", "BenchmarkJudge", "draw_scores", "mean_interval"]
