"""The model and the pictures of most tests: what apps/demo/tiny.py makes, saved in tests/vectors/ without the weights.

So tests of the core need no app; tests/test_tiny.py compares the two.
"""

import pathlib
import shutil
from collections.abc import Callable

import torch
import transformers

from tests.helpers.scripts import VECTORS

FILES = VECTORS / "tiny_model"


def load_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer: a token for each byte, and Qwen's special tokens."""
    return transformers.AutoTokenizer.from_pretrained(FILES)


def save_model(
    folder: pathlib.Path,
    seed: int = 0,
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    change: Callable[[transformers.PreTrainedConfig], object] = lambda config: None,
) -> str:
    """Save a tiny Qwen2.5-VL with random weights, after `change` has been called on its config. Return the folder."""
    config = transformers.AutoConfig.from_pretrained(FILES)
    change(config)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    for path in FILES.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return str(folder)
