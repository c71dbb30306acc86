"""The trained model: loading, the packed forward pass, adapters, sharding, the optimizer and GPU memory.

Imports `common`, `config` and `packing`. Start reading at `model.py`: its `Policy` turns a packed batch into token
log-probabilities. `forward.py` implements this computation, `batches.py` builds micro-batches, `families.py` knows the
supported models, `base_files.py` how their files store them, `sharding.py` applies FSDP2, `lora.py` handles adapters,
`memory.py` decides what fits on a GPU, `export.py` writes the final model.
"""

import logging
import os
import sys

import huggingface_hub.utils
import transformers.utils

# Hugging Face's progress bars would clutter the screen and the log. Downloads take minutes: on a terminal, their bars
# remain.
transformers.utils.logging.disable_progress_bar()  # disables the hub's bars too
if sys.stderr.isatty():
    huggingface_hub.utils.enable_progress_bars()
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # `datasets` is imported only when it is needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU, it only warns about speed
