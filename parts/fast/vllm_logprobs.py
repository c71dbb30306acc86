"""The log-probabilities of the tokens that vLLM samples, without their ranks.

vLLM's own kernels for these log-probabilities read the logits of each token three times. For 256 sequences and 152k
logits each, that takes longer than sampling itself (docs/log.md). Only vLLM's newer model runner calls this; Qwen3.5
and most mixtures of experts run in the older one.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import sampler

_vllm_logprobs = getattr(sampler, "compute_topk_logprobs", None)  # releases after 0.25 have none


def use_fast_logprobs() -> None:
    """Let vLLM's sampler call `sampled_logprobs`, if this release can."""
    if _vllm_logprobs:
        sampler.compute_topk_logprobs = sampled_logprobs


def sampled_logprobs(
    logits: Tensor, num_logprobs: int, tokens: Tensor, cu_num_logits: list[int] | None = None, **options: Any
) -> LogprobsTensors:
    """Return the log-probabilities of the sampled `tokens` (N,) under softmax(`logits`), (N, V). All ranks are 0.

    Requests for more log-probabilities than these go to vLLM's own function.
    """
    if num_logprobs or options.get("max_per_req_token_ids"):
        return _vllm_logprobs(logits, num_logprobs, tokens, cu_num_logits, **options)
    tokens = tokens[:, None]
    return LogprobsTensors(tokens, _logprobs(logits, tokens), torch.zeros_like(tokens[:, 0]), cu_num_logits)


# Without Inductor's online softmax, as in policy/forward.py
@torch.compile(dynamic=True, options={"online_softmax": False})
def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (N, 1) of `tokens` (N, 1) under softmax(`logits`), (N, V)."""
    top = logits.amax(-1, keepdim=True)
    return logits.gather(-1, tokens) - top - (logits - top).exp().sum(-1, keepdim=True).log()
