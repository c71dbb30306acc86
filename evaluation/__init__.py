"""Scoring completions, held-out rows and named benchmarks: metrics, intervals and figures. Its command: `evaluate.py`.

Imports the packages and modules up to `rollout`. Start reading at `held_out.py`, which samples and judges rows and is
also used during training. `scorer.py` computes the rewards of a run, `benchmarks.py` defines the prompt and the scoring
of each benchmark, `metrics.py` summarises predictions and compares two models, `figures.py` draws, and `run_flags.py`
prints the flags that score a trained run.
"""
