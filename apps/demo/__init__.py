"""The default model and data: a tiny Qwen2.5-VL and its data, both built locally, and the data for `--smoke` runs.

Imports `common`, `data`, `policy` and `packing`. Start reading at `tiny.py`, which builds and warm-starts the model.
`smoke.py` writes a few rows in each recipe's real data format. `real.py` makes a folder of a pretrained model from its
packages on PyPI.
"""
