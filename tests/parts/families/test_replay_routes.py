"""Routing replay without vLLM: the trainer on given experts. tests/test_vllm.py has a run."""

import pytest
import torch

import sampling.vllm_engine
from common.errors import RunStopped
from packing import pack
from policy.forward import enable_packed_forward
from policy.model import Policy
from sampling.vllm_engine import VLLMEngine
from sampling.vllm_loop import RequestLoop
from tests.helpers.models import build, make_group
from training.collect import Collector

experts = pytest.importorskip("parts.families.experts", reason="needs parts/families, which is not here")
choose = experts._choose_experts
routes = pytest.importorskip("parts.families.routes", reason="needs parts/families, which is not here")
replay = pytest.importorskip("parts.families.replay_routes", reason="needs parts/families, which is not here")
start_vllm, end = routes.start_vllm, routes.end
Collector.collect, RequestLoop._end = replay.collect, end  # for other tests in this process
Policy.forward, VLLMEngine.sync_weights = replay.forward, replay.sync
sampling.vllm_engine.start_vllm, experts._choose_experts = start_vllm, choose


@pytest.fixture
def policy(monkeypatch) -> Policy:
    monkeypatch.setattr(experts, "_choose_experts", replay.choose_as_sampled)
    monkeypatch.setattr(replay, "ROUTES", {})
    model = build("qwen3_vl_moe")
    enable_packed_forward(model)
    return Policy(model)


def test_the_trainer_takes_given_experts_and_its_own_for_a_last_token(policy):
    group = make_group(policy.model, "qwen3_vl_moe", 12, [(4, 4)], [5, 3], torch.Generator().manual_seed(0))
    batch = pack([group])
    own = replay.forward(policy, batch)[0]
    routers = [*replay.routers(policy.model).values()]
    chosen: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    replay.forward(policy, batch)
    routes = torch.stack(chosen, dim=1)  # (T, M, k)
    prompt, *completions = routes.split(batch.segments.q_lens)
    for change in (0, 1):
        for completion, its_own in zip(group.completions, completions):
            found = torch.cat([prompt, its_own[:-1]])
            tokens = tuple(group.prompt.ids.tolist()), tuple(completion.ids.tolist())
            replay.ROUTES[tokens] = (found + change) % routers[0].weight.shape[0]
        chosen.clear()
        logp = replay.forward_as_sampled(policy, batch)[0]
        given = torch.stack(chosen, dim=1).split(batch.segments.q_lens)
        assert torch.equal(given[-1][:-1], replay.ROUTES[tokens][len(prompt) :])
        if change:
            assert (logp - own).abs().max() > 1e-3
            logp.sum().backward()
            assert all(router.weight.grad.abs().max() > 0 for router in routers), "the weights have gradients"
        else:
            torch.testing.assert_close(logp, own, rtol=0, atol=1e-6)


def test_a_completion_without_known_experts_stops_the_run(policy):
    group = make_group(policy.model, "qwen3_vl_moe", 12, [(4, 4)], [5], torch.Generator().manual_seed(0))
    with pytest.raises(RunStopped, match="replay_routes: no experts are known for a completion: use --engine vllm"):
        replay.forward_as_sampled(policy, pack([group]))
