"""Micro-batches: build the same number on every process, count their FLOPs, and record log-probabilities."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common import distributed
from common.records import Completion, Group, Prompt
from packing import PackedBatch, pack, pack_groups
from policy.experts import experts_per_token
from policy.families import language_model, patches_per_token, routed_experts
from policy.lora import without_dropout
from policy.model import Policy, vision_parameters
from policy.sharding import unsharded


def micro_batches(policy: Policy, groups: list[Group], budget: int) -> Iterator[PackedBatch]:
    """Pack `groups` into micro-batches of at most `budget` tokens, and yield them on the policy's device.

    Every process gets the same number of micro-batches, so that all processes take part in the same collectives. A
    process with fewer micro-batches adds blank ones, whose tokens have weight zero.
    """
    batches = pack_groups(groups, budget)
    num_batches = int(distributed.all_max(torch.tensor(max(1, len(batches)))))
    if len(batches) < num_batches:
        token = torch.zeros(1, dtype=torch.long)
        rows = 3 if hasattr(policy.model.model, "get_rope_index") else 1
        zero = torch.zeros(1)
        blank = Completion(token, zero, old_logp=zero, ref_logp=zero)
        prompt = Prompt(token, [0], torch.zeros(rows, 1, dtype=torch.long))
        batches += [pack([Group(prompt, [blank])]) for _ in range(num_batches - len(batches))]
    if any(parameter.requires_grad for parameter in vision_parameters(policy.model)):
        any_images = distributed.all_max(torch.tensor([bool(batch.vision) for batch in batches]).int())
        for batch, images_on_any_rank in zip(batches, any_images.tolist()):
            batch.dummy_vision = bool(images_on_any_rank) and not batch.vision
    device = next(policy.parameters()).device
    for batch in batches:
        batch.flop = train_flop(policy, batch)
    # Gradients are summed over the copies of the weights only once, after the last micro-batch. If the vision tower is
    # trained, gradients are summed after every micro-batch instead, because the last micro-batch may not run the tower.
    reduce_always = not isinstance(policy, FSDPModule) or any(p.requires_grad for p in vision_parameters(policy.model))

    def prepare(batch: PackedBatch) -> PackedBatch:
        if not reduce_always:
            policy.set_requires_all_reduce(batch is batches[-1])
        return batch.to(device)

    return map(prepare, batches)


def vision_cost_per_token(policy: Policy) -> float:
    """Return the cost of an image token in the vision tower relative to the cost of a token in the decoder stack.

    It is the ratio of the parameter counts of the vision tower and the decoder layers, times the number of patches of
    an image token. It is 0 if the tower is frozen, because its features are cached.
    """
    vision = vision_parameters(policy.model)
    if not any(parameter.requires_grad for parameter in vision):
        return 0.0
    ratio = sum(p.numel() for p in vision) / sum(p.numel() for p in language_model(policy.model).layers.parameters())
    return ratio * patches_per_token(policy.model)


def train_flop(policy: Policy, batch: PackedBatch) -> float:
    """Return the number of floating-point operations in a forward and backward pass of the language model.

    The gradients of the activations cost as much as the forward pass. The gradients of the weights cost as much as the
    forward pass times the fraction of the weights that are trained.
    """
    counts = {False: 0, True: 0}
    for parameter in language_model(policy.model).parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return forward_flop(policy, batch) * (2 + counts[True] / sum(counts.values()))


def forward_flop(policy: Policy, batch: PackedBatch) -> float:
    """Return the number of floating-point operations in a forward pass of the language model.

    Each weight takes two operations per token; of a layer's experts, those count that a token goes through. The
    adapters of experts are not counted. In each attention layer, a pair of a query and a key that the query attends to
    takes four operations per dimension of the heads. In each Gated DeltaNet layer, a token takes six operations per
    element of the heads' states.
    """
    model = language_model(policy.model)
    config = model.config
    named = model.layers.named_parameters()
    shapes = [getattr(p, "quant_state", p).shape for name, p in named if not (".experts." in name and ".lora_" in name)]
    of_experts = [parameter.shape for parameter in routed_experts(policy.model).values()]
    weights = sum(math.prod(shape) for shape in shapes if len(shape) < 3)
    weights += experts_per_token(config) * sum(shape[1] * shape[2] for shape in of_experts)
    pairs = sum(q * (k - q) + q * q / 2 for q, k in zip(batch.segments.q_lens, batch.segments.k_lens))
    head = config.hidden_size * config.vocab_size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = kinds.count("full_attention") * config.num_attention_heads * head_dim * pairs
    if "linear_attention" in kinds:
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        weights += 3 * kinds.count("linear_attention") * state
    return 2.0 * (weights * batch.input_ids.shape[1] + head * len(batch.targets)) + 4.0 * attention


@torch.no_grad()
def completion_logprobs(policy: Policy, groups: list[Group], temperature: float, budget: int) -> list[Tensor]:
    """Return the (L,) log-probabilities under `policy` of each completion of `groups`, in order, in host memory.

    They are computed without dropout.
    """
    with unsharded(policy), without_dropout(policy):
        packed = [(batch.lengths, policy(batch, temperature)[0]) for batch in micro_batches(policy, groups, budget)]
    # copied to the host only now, so that no micro-batch waits for the previous one
    logps = [logp for lengths, batch_logp in packed for logp in batch_logp.cpu().split(lengths)]
    return logps[: sum(len(group.completions) for group in groups)]  # the rest belongs to blank micro-batches
