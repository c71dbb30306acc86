"""Scoring models: sampling held-out rows, named benchmarks, metrics with intervals, figures.

Imports the rooms and modules up to `rollout` and `training`. Start reading at `held_out.py`, which training uses, too.
`benchmarks.py` knows how each benchmark asks and scores, `metrics.py` and `benchmark_metrics.py` sum up predictions,
`progress.py` lets a broken-off evaluation resume, `figures.py` draws. The command is `evaluate.py`.
"""
