"""Checks before an optimizer step: a non-finite loss, disagreement of sampler and trainer, a gradient norm spike."""

import statistics

import torch
from torch import Tensor

from common import distributed
from common.records import Group

MAX_LOGP_DIFFERENCE = 0.1  # nats per token, on average; 0: no limit. A plugin may change it
NONFINITE_HINT = "try a lower --learning_rate or --dtype float32"
DIFFERENCES = ("difference", "difference_max", "fresh_tokens", "image_fresh_tokens", "image_difference")
"""What `metrics.logp_difference` returns."""


def describe_nonfinite(
    stats: dict[str, Tensor], grad_norm: Tensor, groups: list[Group], logps: list[Tensor]
) -> str | None:
    """Describe a non-finite loss or gradient norm and name the rows at fault, or return None when both are finite.

    `groups` are the groups of this process; `logps` are the (L,) log-probabilities of their completions, in order.
    """
    if stats["loss"].isfinite() and grad_norm.isfinite():
        return None
    bad_rows = []
    pairs = [(group, completion) for group in groups for completion in group.completions]
    for (group, completion), logp in zip(pairs, logps):
        tensors = [logp, completion.sampling_logp, completion.trainer_logp]
        tensors += [completion.ref_logp, completion.teacher_logp]
        finite = all(tensor.isfinite().all() for tensor in tensors if tensor is not None)
        if not (finite and torch.as_tensor(completion.advantage).isfinite().all()):
            bad_rows.append(group.prompt.source or f"prompt {group.index}")
    names = sorted({name for names in distributed.all_gather(bad_rows) for name in names})
    rows = f" ({', '.join(names[:5])})" if names else ""
    return f"loss {stats['loss']:.4g}, gradient norm {grad_norm:.4g}{rows}"


def check_logp_difference(stats: dict[str, Tensor], is_first_update: bool) -> str | None:
    """Return an error message if sampler and trainer differ by more than `MAX_LOGP_DIFFERENCE`, else None.

    Later updates of a step are not checked: a step can only be undone before its first update. Nor are tokens that
    earlier steps have sampled, with `--oversample`.
    """
    mean = (stats["difference"] / stats["fresh_tokens"].clamp(min=1)).item()
    if not (is_first_update and MAX_LOGP_DIFFERENCE and mean > MAX_LOGP_DIFFERENCE):
        return None
    return (
        f"the sampler's log-probabilities differ from the trainer's by {mean:.3f} nats per token on average, more than "
        f"{MAX_LOGP_DIFFERENCE:g}: try --plugin parts/check_sync.py and --dtype float32, or --engine hf to avoid vLLM"
    )


def is_spike(norms: list[float]) -> bool:
    """Return whether the last gradient norm is more than 5 times the median of at least 10 earlier norms."""
    return len(norms) > 10 and norms[-1] > 5 * statistics.median(norms[:-1])
