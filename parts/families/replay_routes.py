"""Train each token on the experts that vLLM chose for it: --plugin parts/families/replay_routes.py.

Sampler and trainer round differently, so a mixture of experts sends some tokens to other experts in training than in
sampling. Such a token is trained on another function than the one that sampled it. Here the trainer, and a reference,
use the experts that the sampler chose, but compute their weights themselves, with gradients. This is the routing replay
of Ma et al. 2025 (arXiv:2510.11370). docs/cluster.md has figures. vLLM returns its choices only with its own scheduler,
which is slower than ours, and the choices take k bytes of host memory per token and layer.

Shapes: S tokens of a prompt, L of a completion, T of a micro-batch, M layers, E experts, k experts per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sampling.vllm_engine
from common import distributed
from common.errors import RunStopped
from packing import PackedBatch
from parts.families import experts
from parts.families.routes import ROUTES, keep_and_end, start_with_routes
from policy.families import routers
from policy.model import Policy
from sampling.vllm_engine import VLLMEngine
from sampling.vllm_loop import RequestLoop
from training.collect import Collector

UNKNOWN = -1  # in place of an expert: the trainer chooses
WHAT_TO_DO = "use --engine vllm without --env and --oversample, or leave the plugin out"
collect, forward, sync = Collector.collect, Policy.forward, VLLMEngine.sync_weights


def forget_and_sync(engine: VLLMEngine, policy: Policy) -> None:
    """Forget the choices of the step before, and sync the weights of `policy`."""
    ROUTES.clear()
    sync(engine, policy)


def collect_and_share(collector: Collector, *given: Any) -> Any:
    """Collect a step's groups, and give all choices to every process, since completions move between processes."""
    collected = collect(collector, *given)
    for others in distributed.all_gather(dict(ROUTES)):
        ROUTES.update(others)
    return collected


def choose_as_sampled(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (T, E), and the weights and the indices of the sampler's experts, (T, k) each."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())
    weights, chosen = logits.softmax(-1), logits.topk(router.top_k, dim=-1).indices
    if hasattr(router, "sampled"):
        chosen = torch.where(router.sampled == UNKNOWN, chosen, router.sampled)
    weights = weights.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def sampled_routes(batch: PackedBatch, shape: tuple[int, int]) -> Tensor:
    """Return the sampler's experts (T, M, k) for the tokens of `batch`; `shape` is (M, k)."""
    lengths = batch.segments.q_lens  # of the prompts, then of the completions
    tokens = [tuple(each.tolist()) for each in batch.input_ids[0].cpu().split(lengths)]
    routes = [torch.full((length, *shape), UNKNOWN) for length in lengths]
    first = len(lengths) - len(batch.lengths)
    for i, prompt in enumerate(batch.segments.prompt_of.tolist(), first):
        found = ROUTES.get((tokens[prompt], tokens[i]))
        if found is not None:
            routes[prompt], routes[i][:-1] = found[: lengths[prompt]].long(), found[lengths[prompt] :].long()
        elif any(tokens[i]):  # it is not a dummy
            raise RunStopped(f"replay_routes: no experts are known for a completion: {WHAT_TO_DO}", 1)
    return torch.cat(routes)


def forward_as_sampled(policy: Policy, batch: PackedBatch, *others: Any) -> Any:
    """Let the routers of `policy` take the sampler's choices for `batch`, also when layers are computed again."""
    modules = list(routers(policy.model).values())
    routes = sampled_routes(batch, (len(modules), modules[0].top_k)).to(batch.input_ids.device)
    for router, own in zip(modules, routes.unbind(1)):
        router.sampled = own
    return forward(policy, batch, *others)


experts._choose_experts = choose_as_sampled
sampling.vllm_engine.start_vllm = start_with_routes  # type: ignore[assignment]
Collector.collect = collect_and_share  # type: ignore[method-assign, assignment]
Policy.forward = forward_as_sampled  # type: ignore[method-assign, assignment]
RequestLoop._end = keep_and_end  # type: ignore[method-assign, assignment]
VLLMEngine.sync_weights = forget_and_sync  # type: ignore[method-assign, assignment]
