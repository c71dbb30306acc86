"""What must be in order before an update is made."""

import math
import statistics

from torch import Tensor

from common import distributed
from common.records import Group, Rollout
from packing import PackedBatch

NONFINITE_HINT = "try a lower --learning_rate or --dtype float32"
MicroBatchLogps = list[tuple[list[Rollout], Tensor]]  # of each micro-batch, its completions and their log-probabilities


def describe_nonfinite(
    stats: dict[str, Tensor], grad_norm: Tensor, groups: list[Group], seen: MicroBatchLogps
) -> str | None:
    """What is not a number, and in which rows, of any process; None when loss and gradient are.

    `stats`: sums over the update's tokens, of all processes; `groups` and `seen`: this process's.
    """
    if stats["loss"].isfinite() and grad_norm.isfinite():
        return None
    bad = set()
    for rollouts, logp in seen:
        for rollout, own in zip(rollouts, logp.split([len(r.ids) for r in rollouts])):
            known = [own, rollout.sampling_logp, rollout.old_logp, rollout.ref_logp]
            if not (all(t.isfinite().all() for t in known if t is not None) and math.isfinite(rollout.advantage)):
                bad.add(id(rollout))
    odd = [
        group.sample.source if group.sample else f"prompt {group.group_index}"
        for group in groups
        if any(id(rollout) in bad for rollout in group.rollouts)
    ]
    named = sorted({name for names in distributed.all_gather(odd) for name in names})
    rows = f" ({', '.join(named[:5])})" if named else ""
    return f"loss {stats['loss']:.4g}, gradient norm {grad_norm:.4g}{rows}"


def logp_difference(batch: PackedBatch, trainer_logp: Tensor) -> dict[str, Tensor]:
    """Absolute differences between the trainer's log-probabilities (C,) of the batch's tokens and the sampler's, and
    those of the prompts with pictures: sums over the tokens that count."""
    counted = batch.column("weight") > 0
    with_image = batch.column("has_image") & counted
    difference = (trainer_logp - batch.column("sampler_logp")).abs() * counted
    apart = {"difference": difference.sum(), "difference_max": difference.max()}
    return apart | {"image_tokens": with_image.sum(), "image_difference": (difference * with_image).sum()}


def check_logp_difference(stats: dict[str, Tensor], most: float, first: bool) -> str | None:
    """Why sampler and trainer are too far apart for an update, and what to do about it; None when they are not.

    `most`: nats a token that they may differ by on average, looked at in the `first` update of a step alone, since
    later ones have another policy; 0: any.
    """
    off = (stats["difference"] / stats["tokens"].clamp(min=1)).item()
    if first and most and off > most:
        return (
            f"the sampler's log-probabilities differ from the trainer's by {off:.3f} nats a token on average, more "
            "than --max_logp_difference: try --check_sync and --dtype float32, or --engine hf to leave vLLM out"
        )
    return None


def is_spike(norms: list[float], times: float = 5.0, known: int = 10) -> bool:
    """Whether the last of `norms`, one for each update made, is many `times` the median of those before, of which some
    must be `known`."""
    before = norms[:-1]
    return len(before) >= known and norms[-1] > times * statistics.median(before)
