"""Named benchmarks, intervals, figures and a model beside its baseline: `--benchmark` and `--baseline` of evaluate.py.

Imports the core; evaluate.py imports it. Start reading at `table.py`, which defines the prompt and the scoring of each
benchmark. `scores.py` has bootstrap intervals and compares two models, `figures.py` draws, and `lmms_eval.py` prints
the command that scores a run in lmms-eval.
"""

from parts.benchmarks.figures import draw_scores, write_differences
from parts.benchmarks.scores import mean_interval, pair_predictions, score_difference, summarise_benchmark
from parts.benchmarks.table import check_pairs, judge_benchmark, load_benchmark, start_judge, to_sample

__all__ = [
    "check_pairs",
    "draw_scores",
    "judge_benchmark",
    "load_benchmark",
    "mean_interval",
    "pair_predictions",
    "score_difference",
    "start_judge",
    "summarise_benchmark",
    "to_sample",
    "write_differences",
]
