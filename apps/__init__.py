"""Programs that use the rest, and that nothing in the rest imports: you may ignore them while reading.

`service/` is the counting service over HTTP, `demo/` makes the models and data of the demos, `bench/` measures speed,
`fits.py` prints which ways to train fit into your GPUs, and `notebook.py` trains from Python. Imports anything.
Start reading at `fits.py`.
"""

import sys

# Ctrl-C while a program still imports torch is no mistake: no traceback, and the status that a shell calls 130.
sys.excepthook = lambda kind, *error: None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *error)
