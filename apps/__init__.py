"""Programs that use the rest, and that nothing in the rest imports: you may ignore them while reading.

`service/` is the counting service over HTTP, `demo/` makes the models and data of the demos, `bench/` measures speed,
and `fits.py` prints which ways to train fit into your GPUs. Imports anything. Start reading at `fits.py`.
"""
