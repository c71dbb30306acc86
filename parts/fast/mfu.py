"""The metric `mfu`: operations of the language model, relative to what the GPU could do in the time of the updates."""

import math
from collections import Counter
from collections.abc import Callable

import torch

from common import distributed
from packing import PackedBatch
from policy.families import attention_windows, experts_per_token, head_dim, language_model, routed_experts
from policy.model import Policy

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


class Mfu:
    """Counts the operations of the micro-batches of a step."""

    def __init__(self, policy: Policy):
        self.count, self.flops = flop_counter(policy), 0.0

    def add(self, batch: PackedBatch) -> None:
        """Count the forward and backward pass of `batch`."""
        self.flops += self.count(batch)

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the metric of the updates of a step, which took `seconds`. All processes must call this together."""
        flops = distributed.all_sum(torch.tensor(self.flops, dtype=torch.float64)).item() / distributed.world_size()
        self.flops = 0.0
        return {"mfu": flops / seconds / peak_flops()}


def peak_flops() -> float:
    """Return this GPU's peak dense bfloat16 FLOP/s, or NaN for a GPU that is not listed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), math.nan)


def _pairs(queries: int, keys: int, window: float) -> float:
    """Return how many keys the queries of a segment attend to in total; the last key is that of the last query."""

    def seen(length: float) -> float:  # with `length` queries and as many keys
        return length * length / 2

    out_of_sight = seen(max(0.0, keys - window)) - seen(max(0.0, keys - queries - window))
    return seen(keys) - seen(keys - queries) - out_of_sight


def flop_counter(policy: Policy) -> Callable[[PackedBatch], float]:
    """Return a function that counts the operations of the language model's forward and backward pass on a batch.

    In the forward pass, each weight takes two floating-point operations per token; of a layer's experts, those count
    that a token goes through. The adapters of experts are not counted. In each attention layer, a pair of a query and a
    key that the query attends to takes four operations per dimension of the heads. In each Gated DeltaNet layer, a
    token takes six operations per element of the heads' states.

    In the backward pass, attention costs twice the forward pass. For the rest, the gradients of the activations cost as
    much as the forward pass; those of the weights cost as much times the fraction of the weights that is trained.
    """
    model = language_model(policy.model)
    config = model.config
    named = model.layers.named_parameters()
    shapes = [getattr(p, "quant_state", p).shape for name, p in named if not (".experts." in name and ".lora_" in name)]
    of_experts = [parameter.shape for parameter in routed_experts(policy.model).values()]
    weights = sum(math.prod(shape) for shape in shapes if len(shape) < 3)
    weights += experts_per_token(config) * sum(shape[1] * shape[2] for shape in of_experts)
    windows = Counter(attention_windows(config))  # number of layers by window
    if num_linear := config.num_hidden_layers - windows.total():
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        weights += 3 * num_linear * state
    width = config.num_attention_heads * head_dim(config)
    lm_head = config.hidden_size * config.vocab_size
    counts = {False: 0, True: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += getattr(parameter, "quant_state", parameter).shape.numel()
    trained = counts[True] / sum(counts.values())

    def count(batch: PackedBatch) -> float:
        lengths = list(zip(batch.segments.q_lens, batch.segments.k_lens))
        pairs = sum(layers * _pairs(q, k, window) for window, layers in windows.items() for q, k in lengths)
        dense = 2.0 * (weights * batch.input_ids.shape[1] + lm_head * len(batch.targets))
        return (2 + trained) * dense + 3 * 4.0 * width * pairs

    return count
