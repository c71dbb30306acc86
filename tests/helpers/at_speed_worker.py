"""Train lesson/grpo_at_speed.py and the full code on the same completions, and write how far they are apart.

    torchrun --nproc_per_node 2 tests/helpers/at_speed_worker.py MODEL ROWS.jsonl RESULT.json

Each process takes its share of the prompts in the one file, and all of them in the full code.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

import grpo
from common.records import Completion, Group, Prompt
from config import Config
from lesson import grpo_at_speed as at_speed
from packing import pack
from policy.forward import enable_packed_forward
from policy.model import Policy, load_model

PROMPTS, GROUP, STEPS, RATE = 4, 3, 3, 0.05


def full_policy(model: str) -> Policy:
    """Return the full code's policy, whole on this process, with a frozen tower."""
    loaded = load_model(model, torch.float32)
    enable_packed_forward(loaded)
    loaded.model.visual.requires_grad_(False)
    return Policy(loaded)


def full_groups(groups: list[at_speed.Group], image_token: int) -> list[Group]:
    """Return the groups as the full code has them."""
    converted = []
    for i, (prompt, done) in enumerate(groups):
        own = Prompt(prompt.ids, prompt.sampler_ids, prompt.positions, vision=prompt.vision, image_token=image_token)
        converted.append(
            Group(own, [Completion(each.ids, each.sampler_logp, each.advantage, each.weight) for each in done], i)
        )
    return converted


def sampled(prompts: list[at_speed.Prompt]) -> list[at_speed.Group]:
    """Return random completions of different lengths, with random rewards."""
    lengths = torch.randint(2, 12, (len(prompts), GROUP)).tolist()
    advantages = at_speed.advantages_of(torch.rand(len(prompts), GROUP)).tolist()
    return [
        (prompt, [at_speed.Completion(torch.randint(10, 200, (n,)), -torch.rand(n), advantage=a) for n, a in zip(*own)])
        for prompt, *own in zip(prompts, lengths, advantages)
    ]


def main(model: str, data: str, result: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    settings = at_speed.Settings(model=model, data=data, beta=0.02, updates=2, micro_batch_tokens=110)
    run = at_speed.prepare(settings, torch.device("cpu"))
    optimizer = torch.optim.SGD(run.optimizer.param_groups[0]["params"], RATE)  # Adam turns rounding into steps
    run = at_speed.Run(settings, run.encoder, run.policy, run.reference, optimizer)
    full, reference = full_policy(model), full_policy(model)
    full_optimizer = torch.optim.SGD([p for p in full.parameters() if p.requires_grad], RATE)
    cfg = Config(task="count", data=data, model=model, beta=0.02, num_iterations=2, clip_low=0.2, clip_high=0.2)
    rows = [json.loads(line) for line in pathlib.Path(data).read_text().splitlines()][:PROMPTS]
    prompts = [run.encoder(row) for row in rows]
    at_speed.see(run.policy, prompts)
    apart: dict[str, list[float]] = {"logp": [], "weights": [], "moved": []}
    for _ in range(STEPS):
        groups = sampled(prompts)
        for _, done in groups:
            for each in done:
                each.weight = 1 / (PROMPTS * GROUP * len(each.ids))
        batch = pack(full_groups(groups, run.encoder.image_token))
        with torch.no_grad():
            batch.values.ref_logp, batch.values.trainer_logp = reference(batch, 1.0)[0], full(batch, 1.0)[0]
            apart["logp"].append((run.policy(groups, 1.0) - batch.values.trainer_logp).abs().max().item())
        at_speed.update(run, groups[dist.get_rank() :: dist.get_world_size()])
        before = full.model.model.language_model.embed_tokens.weight.detach().clone()
        for _ in range(2):
            grpo.batch_loss(cfg, batch, full(batch, 1.0)[0])[0].backward()
            torch.nn.utils.clip_grad_norm_([p for p in full.parameters() if p.requires_grad], 1.0)
            full_optimizer.step()
            full_optimizer.zero_grad()
        apart["moved"].append((full.model.model.language_model.embed_tokens.weight - before).abs().max().item())
        ours = {name: weight.full_tensor() for name, weight in run.policy.named_parameters() if weight.requires_grad}
        theirs = dict(full.named_parameters())
        apart["weights"].append(max((ours[name] - theirs[name]).abs().max().item() for name in ours))
    if dist.get_rank() == 0:
        pathlib.Path(result).write_text(json.dumps(apart))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
