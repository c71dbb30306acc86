"""The built-in default: a tiny Qwen2.5-VL and its data, made on the spot, and the data of `--smoke` recipes.

Imports `common`, `data`, `policy` and `packing`. Start reading at `tiny.py`, which builds and warm-starts the model.
`smoke.py` writes a few rows in each recipe's real data format.
"""
