"""The model behind one forward pass: loading, packed forward, adapters, sharding, optimizer, memory.

Imports `common`, `config` and `packing`. Start reading at `model.py`, where `Policy` turns a packed batch into token
log-probabilities, then `forward.py`, which does it. `batches.py` cuts micro-batches, `sharding.py` applies FSDP2,
`optimizer.py` has AdamW and its schedule, `lora.py` adapters, and `memory.py` decides what fits on the GPU.
"""
