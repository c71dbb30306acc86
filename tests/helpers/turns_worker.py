"""Sample episodes of several turns in vLLM, and write what tests/test_vllm.py checks to a JSON file.

    python tests/helpers/turns_worker.py MODEL DTYPE OUT.json

Without a GPU, tests/helpers/vllm_cpu.py runs it.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import parts.check_sync  # noqa: F401 - checks each sync
import rewards
from common import distributed, plugins
from common.errors import UserError
from common.records import Completion, Group, RequestLimits, Rollout, Sample, Sampling
from config import EngineFlags, PolicyFlags
from data import encode_prompts, load_processor, max_images
from parts.turns import use_environment
from parts.turns.episodes import Episode, Episodes
from policy.batches import completion_logprobs
from policy.model import load_policy
from policy.sharding import apply_fsdp
from rollout import make_engine
from sampling.vllm_checks import record_tower_inputs
from tests.helpers.rows import make_sample
from tests.helpers.samplers import groups_of

G, MAX_TOKENS, MAX_TURNS, MAX_SEEN = 4, 120, 4, 1800
END_TOKENS = range(5, 256, 12)  # so many that a turn has a dozen tokens


def make_rows(kinds: list[str], with_images: bool) -> list[Sample]:
    """Return a row for each of `kinds`, which are those of tests/helpers/turns_plugin.py."""
    rng, folder = np.random.default_rng(0), tempfile.mkdtemp()
    rows = []
    for i, kind in enumerate(kinds):
        images = [Image.fromarray(rng.integers(0, 255, (84, 112, 3), dtype=np.uint8))] if with_images else []
        rows.append(make_sample(f"How many, {i}?", "1", images, f"row {i}", {"kind": kind, "folder": folder}))
    return rows


class Turns:
    """A sampler whose prompts are answered by `echo`, and what it has sampled."""

    def __init__(self, model: str, dtype: torch.dtype):
        device = distributed.start()
        plugins.load(str(ROOT / "tests" / "helpers" / "turns_plugin.py"))
        self.processor = use_environment(load_processor(model, "count"), "echo", MAX_TURNS, MAX_SEEN)
        self.with_images = self.processor.family.vision is not None
        self.policy = apply_fsdp(load_policy(model, PolicyFlags(compile=False), device), device, dtype)
        flags = EngineFlags(engine="vllm", vllm_memory=0.1)
        most_images = max_images(make_rows([""], self.with_images), self.processor)
        limits = RequestLimits(MAX_SEEN + MAX_TOKENS, most_images)
        self.engine = make_engine(flags, model, self.processor, device, dtype, limits, self.policy)
        self.engine.stop = [*self.engine.stop, *END_TOKENS]
        self.llm_engine = self.engine.llm.llm_engine
        self.requests: list[tuple[str, int, int, int]] = []  # of each: name, tokens of its prompt, cached, sampled
        step = self.llm_engine.step

        def recorded_step() -> list[Any]:
            outputs = step()
            for each in outputs:
                sizes = len(each.prompt_token_ids), each.num_cached_tokens, len(each.outputs[0].token_ids)
                self.requests.append((each.request_id, *sizes))
            return outputs

        self.llm_engine.step = recorded_step

    def sample(self, kinds: list[str]) -> list[list[Rollout]]:
        """Sample a group for each row, with fresh caches."""
        self.engine.sleep()
        self.engine.wake_up()
        self.engine.sync_weights(self.policy)
        self.requests.clear()
        rows = make_rows(kinds, self.with_images)
        self.prompts = encode_prompts(rows, self.processor)
        episodes = Episodes(rows, self.processor)
        return groups_of(self.engine, self.prompts, [*range(len(rows))], Sampling(G, MAX_TOKENS), episodes)

    def refusal(self, kinds: list[str]) -> str:
        """Return the error that sampling ends with."""
        try:
            self.sample(kinds)
        except (UserError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    def differences(self, rollouts: list[list[Rollout]]) -> list[float]:
        """Return the mean difference between sampler and trainer in each turn, in nats."""
        completions = [[Completion(r.ids, r.sampling_logp, trajectory=r.trajectory) for r in each] for each in rollouts]
        groups = [Group(prompt, each) for prompt, each in zip(self.prompts, completions)]
        logps = completion_logprobs(self.policy, groups, 1.0, 4096)
        by_turn: list[list[torch.Tensor]] = [[] for _ in range(MAX_TURNS)]
        for rollout, logp in zip((rollout for group in rollouts for rollout in group), logps):
            parts = (logp - rollout.sampling_logp).abs().split(rollout.trajectory.turn_lengths)
            for turn, part in enumerate(parts):
                by_turn[turn].append(part)
        return [torch.cat(parts).mean().item() for parts in by_turn]


def cached(requests: list[tuple[str, int, int, int]], block: int) -> list[tuple[int, int]]:
    """Return of each later turn how many tokens of its prompt were cached, and how many could have been."""
    last: dict[str, int] = {}
    pairs = []
    for name, prompt, num_cached, sampled in requests:
        if name in last:
            pairs.append((num_cached, last[name] // block * block))
        last[name] = prompt + sampled - 1  # the last token's keys are not computed
    return pairs


def describe(rollouts: list[list[Rollout]]) -> list[dict[str, Any]]:
    return [
        {
            "ids": rollout.trajectory.ids.tolist(),
            "images": len(rollout.trajectory.images),
            "turns": len(rollout.trajectory.turn_lengths),
            "answers": [turn.text for turn in rollout.trajectory.turns if turn.role == "tool"],
            "failed": rollout.trajectory.num_failed,
            "sampled": len(rollout.ids),
        }
        for group in rollouts
        for rollout in group
    ]


def main(model: str, dtype: str, out: str) -> None:
    turns = Turns(model, getattr(torch, dtype))
    results: dict[str, Any] = {"with_images": turns.with_images}
    kinds = ["", "", "fast", "slow"]
    first = turns.sample(kinds)
    results["differences"] = turns.differences(first)
    results["rollouts"] = describe(first)
    results["order"] = [name for name, *_ in turns.requests]
    if turns.with_images:
        with record_tower_inputs(turns.engine.llm, turns.processor.family.vision.modules[0]) as tower_inputs:
            again = turns.sample(kinds)
        images = [image for group in again for rollout in group for image in rollout.trajectory.images]
        images += [image for prompt in turns.prompts for image in prompt.images]
        results["encoded"] = [len(tower_inputs), len({(image.size, image.tobytes()) for image in images})]
    else:
        again = turns.sample(kinds)
    results["again"] = describe(again)
    results["cached"] = cached(turns.requests, turns.llm_engine.vllm_config.cache_config.block_size)

    rewards.REWARD_TIMEOUT = 1.0
    results["bad"] = describe(turns.sample(["", "hangs", "raises", "many"]))
    add_request, step = turns.llm_engine.add_request, Episode.step

    def add_only_first(name: str, inputs: dict, params: Any) -> None:
        if len(inputs["prompt_token_ids"]) > max(len(prompt.ids) for prompt in turns.prompts):
            raise ValueError("too long")
        add_request(name, inputs, params)

    def broken_step(self: Episode, ids: torch.Tensor, *more: Any) -> bool:
        if self.trajectory.turns:
            raise RuntimeError("broken")
        return step(self, ids, *more)

    def other_ids(self: Episode, *arguments: Any) -> bool:
        goes_on = step(self, *arguments)
        self.added.ids[-1] += 1
        return goes_on

    turns.llm_engine.add_request = add_only_first
    results["refused"] = turns.refusal(["", ""])
    turns.llm_engine.add_request = add_request
    for name, function in (("broken", broken_step), ("other_ids", other_ids)):
        Episode.step = function
        results[name] = turns.refusal(["", ""])
    Episode.step = step
    results["afterwards"] = describe(turns.sample(["", ""]))
    pathlib.Path(out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
