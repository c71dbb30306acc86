"""Micro-batches: fill them, build the same number on every process, count their FLOPs, record log-probabilities."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import distributed
from common.records import Completion, Group, Prompt
from packing import PackedBatch, pack, split_group, split_groups
from policy.families import (
    attention_windows,
    blank_image,
    experts_per_token,
    head_dim,
    language_model,
    patches_per_token,
    routed_experts,
)
from policy.lora import without_dropout
from policy.model import Policy, trains_vision, vision_parameters
from policy.sharding import unsharded


def order_for_packing(groups: Sequence[Group], budget: int) -> list[Group]:
    """Return `groups` in the order of few micro-batches of at most `budget` tokens, by first-fit decreasing.

    The largest comes first, and each goes into the first micro-batch that it fits into. A group that fits into none is
    cut where more than a quarter is free, and its prompt repeated: else, groups of a little more than half the budget
    would leave half of every micro-batch empty. A group that opens one did not fit into the one before, so
    `split_groups` makes the same cuts.
    """
    batches: dict[int, list[Group]] = defaultdict(list)
    free: dict[int, int] = defaultdict(lambda: budget)
    pieces = sorted((part for group in groups for part in split_group(group, budget)), key=lambda part: -part.tokens)
    while pieces:
        piece = pieces.pop(0)
        least = len(piece.prompt.ids) + piece.completions[0].tokens
        whole = (i for i, tokens in free.items() if piece.tokens <= tokens)
        cut = (i for i, tokens in free.items() if least <= tokens > budget / 4)
        i = next(itertools.chain(whole, cut), len(free))
        first, *rest = split_group(piece, free[i])
        if rest:
            pieces.insert(0, replace(piece, completions=[each for group in rest for each in group.completions]))
        batches[i].append(first)
        free[i] -= first.tokens
    return [piece for batch in batches.values() for piece in batch]


def micro_batches(policy: Policy, groups: list[Group], budget: int) -> Iterator[tuple[PackedBatch, bool]]:
    """Pack `groups` into micro-batches of at most `budget` tokens. Yield each on the policy's device, and whether it is
    the last.

    Every process gets the same number of micro-batches, so that all processes take part in the same collectives. A
    process with fewer micro-batches adds dummy ones, whose tokens have weight zero. A process without images, while
    others run a trained vision tower, adds a blank image, which replaces no token. Each micro-batch is packed only
    when it is needed, while the GPU still works on the one before.
    """
    parts = split_groups(groups, budget)
    num_batches = int(distributed.all_max(torch.tensor(max(1, len(parts)))))
    parts += [[_dummy_group(policy)]] * (num_batches - len(parts))
    run_tower = torch.tensor([any(group.image_tokens for group in part) for part in parts])
    if distributed.world_size() > 1 and trains_vision(policy.model):
        run_tower = distributed.all_max(run_tower.int()).bool()
        if 1 < policy.num_shards < distributed.world_size():
            # FSDP sums the gradients that it reduces in each micro-batch, so all must cover the same weights.
            run_tower[:] = run_tower.any()
    device, count_flop = next(policy.parameters()).device, flop_counter(policy)
    for i, part in enumerate(parts):
        batch = pack(part)
        if run_tower[i] and not batch.vision:
            batch.vision = blank_image(policy.model).vision
        batch.flop = count_flop(batch)
        yield batch.to(device), i + 1 == num_batches


def _dummy_group(policy: Policy) -> Group:
    """Return a prompt and a completion of two tokens each, with weight zero.

    With one token each, torch.compile would compile the decoder layer anew: it takes sizes of 1 for constants.
    """
    tokens, zeros = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    axes = 3 if hasattr(policy.model.model, "get_rope_index") else 1
    prompt = Prompt(tokens, [0, 0], torch.arange(2).expand(axes, -1))
    return Group(prompt, [Completion(tokens, zeros, trainer_logp=zeros, ref_logp=zeros, teacher_logp=zeros)])


def vision_cost_per_token(policy: Policy) -> float:
    """Return the cost of an image token in the vision tower relative to the cost of a token in the decoder stack.

    It is the ratio of the parameter counts of the vision tower and the decoder layers, times the number of patches of
    an image token. It is 0 if the tower is frozen, because its features are cached.
    """
    if not trains_vision(policy.model):
        return 0.0
    ratio = sum(p.numel() for p in vision_parameters(policy.model)) / sum(
        p.numel() for p in language_model(policy.model).layers.parameters()
    )
    return ratio * patches_per_token(policy.model)


def _pairs(queries: int, keys: int, window: float) -> float:
    """Return how many keys the queries of a segment attend to in total; both end at the same token."""

    def seen(length: float) -> float:  # by as many queries as keys
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
    much as the forward pass, and those of the weights as much times the fraction of the weights that are trained.
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


@torch.no_grad()
def completion_logprobs(policy: Policy, groups: list[Group], temperature: float, budget: int) -> list[Tensor]:
    """Return the (L,) log-probabilities under `policy` of each completion of `groups`, in order, in host memory.

    They are computed without dropout.
    """
    with unsharded(policy), without_dropout(policy):
        packed = [(batch.lengths, policy(batch, temperature)[0]) for batch, _ in micro_batches(policy, groups, budget)]
    # copied to the host only now, so that no micro-batch waits for the previous one
    logps = [logp for lengths, batch_logp in packed for logp in batch_logp.cpu().split(lengths)]
    return logps[: sum(len(group.completions) for group in groups)]  # the rest belongs to dummy micro-batches
