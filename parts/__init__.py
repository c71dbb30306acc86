"""What is optional: the core runs without this folder, and without each file and folder in it.

A part imports the core and no other part. The core imports a part within a function, where a flag, a name or a row
asks for it: `from parts.NAME import …`. Where it is missing, one line says so, and the command ends with status 2.
A plain run imports only `pages` (none with `--report_every 0`) and, on a GPU, `fast`, and does without those that are
missing (`common/parts.py`). Imports everything up to `grpo.py`. Start reading at `pages/report.py`, whose `Pages` a
run's log calls.
"""
