"""One GRPO step by hand: from a picture to a gradient, on a CPU, in a few seconds.

`python -m examples.one_step` prints each tensor with its shape beside its line of Algorithm 1 (arXiv:2402.03300). The
model is tiny and has random weights.
"""

import pathlib
import tempfile

import numpy as np
import torch

import grpo
from apps.demo import tiny
from common.records import Rewards, Sample, Sampling, ScoredGroup, Turn
from config import PolicyFlags
from data import encode_prompt, load_processor
from packing import pack
from policy.model import load_model, load_policy
from rewards import count_reward
from rollout import sample_completions
from sampling.hf_engine import HFEngine


def show(line: str, name: str, value: torch.Tensor) -> None:
    numbers = ", ".join(f"{number:.3g}" for number in value.flatten()[:6].tolist())
    print(f"{line:8} {name:36} {tuple(value.shape)!s:12} {numbers}{', …' if value.numel() > 6 else ''}")


def main() -> None:
    cfg, tokenizer = grpo.Config(data="-", num_generations=4, prompts_per_step=1), tiny.byte_tokenizer()
    grpo.resolve_loss(cfg)
    folder = pathlib.Path(tempfile.mkdtemp())
    tiny.save(tiny.build_model(tokenizer, seed=0), tokenizer, folder)
    processor, policy = (
        load_processor(str(folder), "count"),
        load_policy(str(folder), PolicyFlags(), torch.device("cpu")),
    )
    sampler = HFEngine(load_model(str(folder), torch.float32).eval(), tokenizer)
    picture = tiny.draw_shapes(3, "circle", np.random.default_rng(0))
    sample = Sample([Turn("user", [picture, "How many circles?"])], "A photo of 3 circles", "example")
    prompt = encode_prompt(sample, processor)
    show("line 5", "prompt, with image tokens", prompt.ids)
    show("", "patches of the picture", prompt.vision["pixel_values"])
    sampler.sync_weights(policy)
    show("line 6", "π_old: lm_head of the sampler", sampler.model.lm_head.weight)
    how = Sampling(cfg.num_generations, max_tokens=8)
    (rollouts,) = sample_completions(sampler.generate, processor, [prompt], [0], how)
    for rollout in rollouts:
        show("line 7", f"completion {rollout.text!r}"[:36], rollout.ids)
    rewards = torch.tensor([[count_reward(rollout.text, sample.answer) for rollout in rollouts]])
    rewards += torch.arange(4) / 10  # random weights count nothing right, and equal rewards teach nothing
    show("line 8", "rewards", rewards)
    advantages = grpo.group_advantages(rewards)
    show("line 9", "advantages", advantages)
    scored = ScoredGroup(sample, prompt, rollouts, [Rewards(r, r) for r in rewards[0].tolist()], 0)
    batch = pack(grpo.training_groups(cfg, [scored], advantages))
    show("line 11", "packed: the prompt once, then all", batch.input_ids)
    logp, _ = policy(batch)
    show("", "log π_θ of the completion tokens", logp)
    loss, _ = grpo.batch_loss(cfg, batch, logp)
    show("", "loss", loss)
    loss.backward()
    show("", "gradient of the lm_head", policy.model.lm_head.weight.grad)


if __name__ == "__main__":
    main()
