"""What is optional: the core runs without this folder, and without each file and folder in it.

A part imports the core and no other part. The core imports a part within a function, where a flag, a name or a row
asks for it: `from parts.NAME import …`. Imports everything up to `grpo.py`. Start reading at `pages/report.py`, whose
`Pages` a run's log calls; `common/parts.py` finds the parts that may be missing.
"""
