"""Models of the benches that are too large for a file: random weights, sharded as they are made.

A 30B model takes 61 GB in bfloat16. Written to disk, every start would read them again, and the main process would
hold all of them. Here, it makes one parameter at a time on its device and sends it, and each process keeps its shard.
The values depend on the names of the parameters alone: they are the same on any number of processes, and a reference
begins like its policy. vLLM reads no weights in a run: it gets them with the first sync.

Imported by the benches only. A plain run knows nothing of it.
"""

import math
import zlib
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor

import policy.model
import policy.sharding
import rollout
from policy.model import auto_class, load_config

STD = 0.02  # of a matrix, as in transformers' own initialisation
# Two things make random weights unlike trained ones, and these deviations avoid both. Attention averages its values,
# which gives all tokens the same direction, more so in each layer: most would go to the same eight experts. And if a
# layer adds as much as there is, differences of rounding grow from layer to layer: after 48, sampler and trainer would
# be 0.9 nats apart. So the residual stream begins large, and each layer adds little to it.
STDS = {"embed_tokens": 1.0, "o_proj": 0.001, "down_proj": 0.007}  # by a word of the name
read_state = policy.sharding._state_to_send


def use_random_weights() -> None:
    """Let this process make the weights of every model that it loads from now on.

    The functions of the core are replaced, so that a plain run pays nothing for it.
    """
    for module in (policy.model, policy.sharding, rollout):
        module.load_model = load_random_model
    policy.sharding._state_to_send = lambda model: RandomState(read_state(model))


def load_random_model(
    name: str, dtype: torch.dtype, device: Any = None, to_shard: bool = False, config: Any = None
) -> transformers.PreTrainedModel:
    """Return the model whose config.json is in the folder `name`; the arguments are those of `load_model`.

    Its buffers are real, its weights are on the meta device, where `apply_fsdp` fills them. The copy of a sampler
    (not `to_shard`) gets NaN, which only a sync removes.
    """
    assert device is None, "`BenchFlags` refuses load_in_4bit"
    config = config or load_config(name)
    with init_empty_weights():
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation="sdpa")
    if not to_shard:
        model._apply(lambda tensor: torch.full_like(tensor, math.nan, device="cpu") if tensor.is_meta else tensor)
    return model


class RandomState(dict[str, Tensor]):
    """What `apply_fsdp` takes from the main process: tensors by name, of which those on the meta device are made."""

    def pop(self, name: str, *default: Any) -> Tensor:
        """Return the tensor `name`, and forget it."""
        tensor = super().pop(name, *default)
        return random_weight(name, tensor.shape) if tensor.is_meta else tensor


def random_weight(name: str, shape: torch.Size) -> Tensor:
    """Return the float32 weight `name`: ones for a norm, zeros for a bias and the B of an adapter, else normal."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if name.endswith("bias") or ".lora_B." in name:
        return torch.zeros(shape, device=device)
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    std = STD if ".lora_" in name else next((std for word, std in STDS.items() if word in name), STD)
    return torch.empty(shape, device=device).normal_(std=std, generator=generator)
