"""Micro-batches: fill them, build the same number on every process, record log-probabilities."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import distributed
from common.records import Completion, Group, Prompt
from packing import PackedBatch, pack, split_group, split_groups
from policy.families import (
    blank_image,
    language_model,
    patches_per_token,
)
from policy.lora import without_dropout
from policy.model import Policy, trains_vision, vision_parameters
from policy.sharding import unsharded


def order_for_packing(groups: Sequence[Group], budget: int) -> list[Group]:
    """Order and cut `groups` so that they fill few micro-batches of at most `budget` tokens (first-fit decreasing).

    The largest comes first, and each goes into the first micro-batch that it fits into. If it fits into none, it is cut
    to fill one that is more than a quarter free, and its prompt is repeated. Without cuts, groups of a little more than
    half the budget would leave half of every micro-batch empty. `split_groups` starts its micro-batches at the same
    groups, because the first group of each does not fit into the micro-batch before.
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
    """Yield `groups` as packed micro-batches of at most `budget` tokens, on the policy's device; True: it is the last.

    Every process gets the same number of micro-batches, so that all processes take part in the same collectives. A
    process with fewer micro-batches adds dummy ones, whose tokens have weight zero. If others run a trained vision
    tower, a process without images adds a blank image, which replaces no token. Each micro-batch is packed only
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
    device = next(policy.parameters()).device
    for i, part in enumerate(parts):
        batch = pack(part)
        if run_tower[i] and not batch.vision:
            batch.vision = blank_image(policy.model).vision
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
