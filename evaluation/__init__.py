"""Scoring completions and held-out rows. Its command: `evaluate.py`. parts/benchmarks has named benchmarks.

Imports the packages and modules up to `rollout`. Start reading at `held_out.py`, which samples and judges rows and is
also used during training. `scorer.py` computes the rewards of a run, `metrics.py` their means, `predictions.py`
judges the rows of evaluate.py, and `benchmarks.py` is the table that plugins extend.
"""
