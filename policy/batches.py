"""TODO policy/batches.py"""

import math
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from common import distributed
from common.records import Group, Prompt, Rollout
from packing import PackedBatch, pack, pack_groups
from policy.forward import language_model
from policy.model import Policy, vision_parameters
from policy.sharding import unsharded


def micro_batches(policy: Policy, groups: list[Group], budget: int) -> Iterator[PackedBatch]:
    """`groups` packed and moved to the policy's device: as many micro-batches on every process, so that all of them
    take part in the same collectives, with blank ones (weight zero) where this process has fewer."""
    batches = pack_groups(groups, budget)
    most = int(distributed.all_max(torch.tensor(max(1, len(batches)))))
    if len(batches) < most:
        token = torch.zeros(1, dtype=torch.long)
        rows = 3 if hasattr(policy.model.model, "get_rope_index") else 1
        blank = Rollout(token, torch.zeros(1), old_logp=torch.zeros(1), ref_logp=torch.zeros(1))
        prompt = Prompt(token, [0], torch.zeros(rows, 1, dtype=torch.long))
        batches += [pack([Group(prompt, [blank])]) for _ in range(most - len(batches))]
    if any(parameter.requires_grad for parameter in vision_parameters(policy.model)):
        with_images = distributed.all_max(torch.tensor([bool(batch.vision) for batch in batches]).int())
        for batch, anywhere in zip(batches, with_images.tolist()):
            batch.dummy_vision = bool(anywhere) and not batch.vision
    device = next(policy.parameters()).device
    for batch in batches:
        batch.flop = train_flop(policy, batch)
    # Copies of the weights exchange their gradients once, with the last micro-batch; with each one where the vision
    # tower is trained, which the last one may leave out.
    always = not isinstance(policy, FSDPModule) or any(p.requires_grad for p in vision_parameters(policy.model))

    def handed_out(batch: PackedBatch) -> PackedBatch:
        if not always:
            policy.set_requires_all_reduce(batch is batches[-1])
        return batch.to(device)

    return map(handed_out, batches)


def vision_cost_per_patch(policy: Policy) -> float:
    """What a patch costs the vision tower, as a share of what a token costs the decoder stack, by their numbers of
    parameters; 0 when the tower is frozen, whose features are known."""
    vision = vision_parameters(policy.model)
    if not any(parameter.requires_grad for parameter in vision):
        return 0.0
    return sum(p.numel() for p in vision) / sum(p.numel() for p in language_model(policy.model).layers.parameters())


def train_flop(policy: Policy, batch: PackedBatch) -> float:
    """Operations of a forward and backward pass: the gradients of activations cost as much as the forward pass, those
    of weights the share that is trained."""
    weights = dict.fromkeys((False, True), 0)
    for parameter in language_model(policy.model).parameters():
        weights[parameter.requires_grad] += parameter.numel()
    return forward_flop(policy, batch) * (2 + weights[True] / sum(weights.values()))


def forward_flop(policy: Policy, batch: PackedBatch) -> float:
    """Floating-point operations of a forward pass of the language model: two for each weight and token, four for each
    query, key and hidden unit that attention brings together."""
    model = language_model(policy.model)
    config = model.config
    weights = sum(math.prod(getattr(p, "quant_state", p).shape) for p in model.layers.parameters())
    pairs = sum(q * (k - q) + q * q / 2 for q, k in zip(batch.segments.q_lens, batch.segments.k_lens))
    head = config.hidden_size * config.vocab_size
    attention = config.num_hidden_layers * config.hidden_size * pairs
    return 2.0 * (weights * batch.input_ids.shape[1] + head * len(batch.targets)) + 4.0 * attention


@torch.no_grad()
def record_logprobs(policy: Policy, groups: list[Group], name: str, temperature: float, budget: int) -> None:
    """Store the log-probabilities that `policy` gives each completion under the attribute `name`."""
    with unsharded(policy):
        found = [(batch.rollouts, policy(batch, temperature)[0]) for batch in micro_batches(policy, groups, budget)]
    for rollouts, logp in found:  # to the host only now: no micro-batch waits for the one before
        for rollout, of_rollout in zip(rollouts, logp.cpu().split([len(r.ids) for r in rollouts])):
            setattr(rollout, name, of_rollout)
