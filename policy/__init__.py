"""The trained model: loading, the packed forward pass, adapters, sharding, the optimizer and GPU memory.

Imports `common`, `config` and `packing`. Start reading at `model.py`: its `Policy` turns a packed batch into token
log-probabilities. `forward.py` computes them. `batches.py` cuts micro-batches, `sharding.py` applies FSDP2,
`optimizer.py` has AdamW and its schedule, `lora.py` handles adapters, and `memory.py` decides what fits on the GPU.
"""

import logging

import transformers.utils

# Before the first model class is imported: transformers would import scikit-learn, pandas and SciPy for features that
# nothing here uses, which takes more than a second at every start. Modules imported before this package therefore write
# `transformers.NAME` instead of importing a model class by name.
transformers.utils.is_sklearn_available = transformers.utils.is_scipy_available = lambda: False
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its warnings on a CPU only concern speed
