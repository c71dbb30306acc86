"""The default model and data: builds a tiny Qwen2.5-VL and its data locally, and writes the data for `--smoke` runs.

Imports `common`, `data`, `policy` and `packing`. Start reading at `tiny.py`, which builds and warm-starts the model.
`smoke.py` writes a few rows in each recipe's real data format.
"""
