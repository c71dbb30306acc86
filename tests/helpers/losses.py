"""`grpo.batch_loss` as a function of tensors."""

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

import grpo


@dataclass(frozen=True)
class LossOptions:
    """The flags on which the loss depends."""

    loss_type: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    dual_clip: float = 0.0


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    completion_of_token: Tensor,
    options: LossOptions = LossOptions(),
    ref_logp: Tensor | None = None,
    importance: Tensor | None = None,
    sampling_logp: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a step of several updates, with this importance weight of each token, and its sums."""
    cap = 0.0 if importance is None else torch.inf
    flags = {"old_logp": "policy", "updates_per_step": 2, "importance_cap": cap}
    flags["teacher"] = None
    if sampling_logp is None:
        sampling_logp = old_logp if importance is None else old_logp - importance.log()
    stale = has_image = torch.zeros_like(logp, dtype=torch.bool)
    values = SimpleNamespace(
        sampling_logp=sampling_logp,
        advantages=advantages,
        token_weights=weights,
        stale=stale,
        has_image=has_image,
        trainer_logp=old_logp,
        ref_logp=ref_logp,
        teacher_logp=None,
        per_token=False,
    )
    batch = SimpleNamespace(values=values, completion_of_token=completion_of_token)
    return grpo.batch_loss(SimpleNamespace(**asdict(options), **flags), batch, logp)
