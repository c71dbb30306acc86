"""Everything a run needs besides the algorithm: collecting, updating, the loop, checkpoints, metrics and logs.

Imports the packages and modules up to `evaluation`. Start reading at `loop.py`, which takes the steps; `collect.py` and
`updates.py` do what a step asks for, `run.py` sets a run up. `prompt_stream.py` orders the rows, `guards.py` checks an
update, `checkpoint.py` saves, `run_folder.py` decides where a run resumes, `resume.py` compares it with its checkpoint,
`metrics.py` measures, `diagnosis.py` warns, and `run_log.py` logs.
"""
