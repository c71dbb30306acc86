"""Run the vLLM engine through several rounds of sleep, wake-up and sync, and write measurements to a JSON file.

    python tests/helpers/vllm_worker.py MODEL DATA OUT.json

tests/test_vllm.py runs this script in a separate process, because a process can have only one vLLM engine with
sleep mode. Without a GPU, tests/helpers/vllm_cpu.py runs it.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import parts.check_sync  # noqa: F401 - checks each sync
from common import distributed
from common.errors import UserError
from common.records import Completion, Group, RequestLimits, Sampling
from config import EngineFlags, PolicyFlags
from data import encode_prompts, load_processor, load_samples
from policy.batches import completion_logprobs
from policy.model import cache_image_features, load_policy
from policy.sharding import apply_fsdp
from rollout import make_engine
from sampling.vllm_checks import check_pixels
from tests.helpers.rows import make_sample
from tests.helpers.samplers import groups_of
from tests.helpers.versions import loaded_packages


def differences(policy, prompts, groups) -> dict[str, float]:
    """Return the mean absolute difference of log-probabilities between sampler and trainer, with and without images."""
    completions = [[Completion(r.ids, r.sampling_logp) for r in rollouts] for rollouts in groups]
    packed = [Group(prompt, group) for prompt, group in zip(prompts, completions)]
    logps = iter(completion_logprobs(policy, packed, 1.0, 4096))
    kinds: dict[str, list] = {"image": [], "text": []}
    for prompt, rollouts in zip(prompts, groups):
        for rollout in rollouts:
            difference = (next(logps) - rollout.sampling_logp).abs()
            kinds["image" if prompt.images else "text"].append(difference)
    return {kind: torch.cat(tensors).mean().item() for kind, tensors in kinds.items()}


def mib_of_blocks() -> dict[str, list[float]]:
    """Return the sizes of the blocks of GPU memory that vLLM gives back when it goes to sleep."""
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks: dict[str, list[float]] = {"weights": [], "kv_cache": []}
    for block in CuMemAllocator.get_instance().pointer_to_data.values():
        blocks[block.tag].append(block.handle[1] / 2**20)
    return blocks


def refusal(generate: Callable[[], object]) -> str:
    """Return the message with which a call of `generate` is refused."""
    try:
        generate()
    except UserError as error:
        return str(error)
    return "accepted"


def main(model: str, data: str, out: str) -> None:
    device = distributed.start()
    processor = load_processor(model, "count")
    samples = load_samples(data, "count")[:4]
    samples += [make_sample(f"How much is {i} + {i}?", "1", [], f"text {i}") for i in range(4)]
    samples.append(make_sample("<image><image>Which?", "1", samples[0].images + samples[1].images, "two images"))
    prompts = encode_prompts(samples, processor)
    flags = EngineFlags(engine="vllm", vllm_memory=0.1)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    policy = apply_fsdp(load_policy(model, PolicyFlags(compile=False), device), device, dtype)
    engine = make_engine(flags, model, processor, device, dtype, RequestLimits(1024, 2), policy)
    engine.sleep()
    results: dict = {"rounds": [], "mib_of_blocks": mib_of_blocks() if on_gpu else None}
    decode = processor.tokenizer.decode
    for number in range(3):
        with torch.no_grad():  # stands in for an update, so that each round has a different policy
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * parameter.abs().mean() * 0.1 * number)
        torch.cuda.empty_cache()
        asleep = torch.cuda.mem_get_info()[0] if on_gpu else 0
        engine.wake_up()
        engine.sync_weights(policy)
        awake = torch.cuda.mem_get_info()[0] if on_gpu else 0
        if number == 1:
            cache_image_features(policy, prompts, {})
        seeds = list(range(10 * number, 10 * number + len(prompts)))
        groups = groups_of(engine, prompts, seeds, Sampling(3, 24))
        engine.sleep()
        engine.wake_up()
        engine.sync_weights(policy)
        second_groups = groups_of(engine, prompts, seeds, Sampling(3, 24))
        greedy = groups_of(engine, prompts, seeds, Sampling(1, 24, temperature=0.0))
        engine.sleep()
        rollouts = [rollout for group in groups for rollout in group]
        repeated = [rollout for group in second_groups for rollout in group]
        results["rounds"].append(
            {
                "features": prompts[0].features is not None,
                "freed_mib": (asleep - awake) / 2**20,
                "difference": differences(policy, prompts, groups),
                "greedy_difference": differences(policy, prompts, greedy),
                "repeated_fraction": sum(torch.equal(a.ids, b.ids) for a, b in zip(rollouts, repeated)) / len(rollouts),
                "distinct": len({tuple(rollout.ids.tolist()) for rollout in rollouts}),
                "lengths": [len(rollout.ids) for rollout in rollouts],
                "truncated": [rollout.truncated for rollout in rollouts],
                "ends": [int(rollout.ids[-1]) in engine.stop for rollout in rollouts],
                "texts": [r.text == decode(r.ids if r.truncated else r.ids[:-1]) for r in rollouts],
            }
        )
    results["pixels_checked"] = engine.pixels_checked
    pixels = [prompts[0].vision["pixel_values"] + 0.1]
    results["wrong_pixels"] = refusal(lambda: check_pixels(prompts[:1], pixels))
    engine.wake_up()
    engine.sync_weights(policy)
    other = dataclasses.replace(prompts[0], ids=prompts[0].ids[:-1])
    results["wrong_ids"] = refusal(lambda: groups_of(engine, [other], [0], Sampling(1, 4)))
    long = dataclasses.replace(prompts[4], engine_ids=prompts[4].engine_ids * 200)
    results["too_long"] = refusal(lambda: groups_of(engine, [prompts[5], long], [0, 1], Sampling(1, 4)))
    few, many = (groups_of(engine, p, list(range(len(p))), Sampling(2, 24)) for p in (prompts[:2], prompts))
    results["alone"] = [torch.equal(a.ids, b.ids) for one, two in zip(few, many) for a, b in zip(one, two)]
    moved = groups_of(engine, prompts[:2], [100, 101], Sampling(2, 24))
    results["other_seeds"] = [torch.equal(a.ids, b.ids) for one, two in zip(few, moved) for a, b in zip(one, two)]
    mixture = dict(runner_type="generate", architectures=["Qwen3VLMoeForConditionalGeneration"], is_moe=True)
    settings = type(engine.llm.llm_engine.vllm_config)
    is_default = getattr(settings, "_is_default_v2_model_runner_model", lambda _: True)  # later releases do not ask
    results["newer_runner"] = is_default(SimpleNamespace(model_config=SimpleNamespace(**mixture)))
    results["packages"] = loaded_packages()
    pathlib.Path(out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
