"""What keeps a run going: prompts in order, balanced processes, checks before an update, checkpoints, logs.

Imports the rooms and modules up to `data`. Start reading at `prompt_stream.py`, which decides which rows come when.
`balance.py` moves completions between processes, `guards.py` checks an update, `checkpoint.py` saves and resumes,
`export.py` writes the final model, `metrics.py` measures a step, `run_log.py` and `report.py` write what people read.
"""
