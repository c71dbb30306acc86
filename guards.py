"""What must be in order before an update is made."""

from torch import Tensor


def trouble(stats: dict[str, Tensor], grad_norm: Tensor, max_difference: float, first: bool) -> str | None:
    """Why an update must not be made, and what to do about it; None when all is well.

    `stats`: sums over the update's tokens. `max_difference`: most nats a token that sampler and trainer may differ by
    on average, looked at in the `first` update of a step alone, since later ones have another policy; 0: any.
    """
    if not (stats["loss"].isfinite() and grad_norm.isfinite()):
        return (
            f"loss {stats['loss']:.4g}, gradient norm {grad_norm:.4g}: try a lower --learning_rate or --dtype float32"
        )
    off = (stats["difference"] / stats["tokens"].clamp(min=1)).item()
    if first and max_difference and off > max_difference:
        return (
            f"the sampler's log-probabilities differ from the trainer's by {off:.3f} nats a token on average, more "
            "than --max_logp_difference: try --check_sync and --dtype float32, or --engine hf to leave vLLM out"
        )
    return None
