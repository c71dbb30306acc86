"""Everything a run needs besides the step itself: setting up, prompt order, balance, checkpoints, metrics and logs.

Imports the packages and modules up to `rollout`. Start reading at `run.py`, which sets a run up. `prompt_stream.py`
orders the rows, `partial_rollouts.py` keeps what is in flight, `losses.py` has the losses, `balance.py` moves
completions between processes, `guards.py` checks an update, `checkpoint.py` saves, `run_folder.py` decides where a run
resumes, `export.py` writes the final model, `metrics.py` measures, `run_log.py` writes logs, and `report.py` draws the
curves.
"""
