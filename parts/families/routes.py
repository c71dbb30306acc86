"""The experts that vLLM chooses for each token: imported by `replay_routes.py`, which trains on them.

Shapes: S tokens of a prompt, L of a completion, M layers, k experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from common.errors import RunStopped, UserError
from policy.model import load_config
from sampling.vllm_loop import RequestLoop
from sampling.vllm_start import start_vllm, undo_global_changes

Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # of a prompt and of a completion
ROUTES: dict[Tokens, Tensor] = {}  # experts (S + L - 1, M, k) of all tokens but the last
end = RequestLoop._end


def start_with_routes(flags: Any, model: str, *others: Any) -> Any:
    """Start vLLM as `start_vllm` does, but with its own scheduler, so that it returns its choices.

    Raises UserError if the model is not a Qwen3-VL-MoE.
    """
    config = load_config(model)
    if config.model_type != "qwen3_vl_moe":
        raise UserError(
            f"the routes of Qwen3-VL-MoE are known, but {model} is a {config.model_type}: use another model"
        )
    with undo_global_changes(config):
        import vllm
    start = vllm.LLM
    vllm.LLM = lambda model, scheduler_cls=None, **options: start(model, enable_return_routed_experts=True, **options)
    try:
        return start_vllm(flags, model, *others)
    finally:
        vllm.LLM = start


def keep_and_end(loop: RequestLoop, output: Any, pool: Any) -> None:
    """Keep the choices for a completion that has ended. Raises RunStopped if a token's are missing."""
    (sampled,) = output.outputs
    tokens = tuple(output.prompt_token_ids), tuple(sampled.token_ids)
    found = torch.empty(0) if sampled.routed_experts is None else torch.from_numpy(sampled.routed_experts)
    is_complete = len(found) == sum(map(len, tokens)) - 1
    if not is_complete or (found.sort(-1).values.diff(dim=-1) == 0).any():  # all zeros, if nothing fills them
        how = "use vLLM 0.25.1 on a GPU or, without one, tests/helpers/vllm_cpu.py"
        raise RunStopped(f"vLLM's kernels do not report the experts of every token here: {how}", 1)
    ROUTES[tokens] = found
    end(loop, output, pool)
