"""Train lesson/grpo_at_speed.py and the full code on the same completions, and write how far they are apart.

    torchrun --nproc_per_node 2 tests/helpers/at_speed_worker.py MODEL ROWS.jsonl RESULT.json

Each process takes its share of the prompts in the one file, and all of them in the full code.
"""

import json
import math
import pathlib
import sys

import torch
import torch.distributed as dist

import grpo
from common.records import Completion, Group, Prompt
from config import Config
from lesson import grpo_at_speed as at_speed
from packing import PackedBatch, pack
from policy.forward import enable_packed_forward
from policy.model import Policy, load_model

PROMPTS, GROUP, STEPS, RATE = 4, 3, 3, 0.1


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


def prepared(model: str, data: str, beta: float) -> tuple[at_speed.Run, list[at_speed.Prompt]]:
    """Return a run of the one file with SGD (Adam turns rounding into steps), and the prompts."""
    settings = at_speed.Settings(model=model, data=data, beta=beta, updates=2, micro_batch_tokens=110)
    run = at_speed.prepare(settings, torch.device("cpu"))
    optimizer = torch.optim.SGD(run.optimizer.param_groups[0]["params"], RATE)
    run = at_speed.Run(settings, run.encoder, run.policy, run.reference, optimizer)
    rows = [json.loads(line) for line in pathlib.Path(data).read_text().splitlines()][:PROMPTS]
    prompts = [run.encoder(row) for row in rows]
    at_speed.see(run.policy, prompts)
    return run, prompts


@torch.no_grad()
def both_losses(
    run: at_speed.Run, full: Policy, groups: list[at_speed.Group], batch: PackedBatch, cfg: Config
) -> tuple[float, float]:
    """Return the loss of all groups in the one file and in the full code, with their weights as they are."""
    ours = at_speed.loss_of(run.policy(groups, 1.0), groups, run.settings)
    return ours.item(), grpo.batch_loss(cfg, batch, full(batch, 1.0)[0])[0].item()


def compare(model: str, data: str, beta: float, idle: bool) -> dict[str, list[float]]:
    """Return how far apart the two are in each step, and what shares of the tokens were clipped and capped.

    The loss is compared before the first and after the last update; `changed` is how much it changes in between.

    `idle`: every other prompt has no advantages, so that without a KL term, the second process has nothing to do.
    """
    run, prompts = prepared(model, data, beta)
    full, reference = full_policy(model), full_policy(model)
    full_optimizer = torch.optim.SGD([p for p in full.parameters() if p.requires_grad], RATE)
    cfg = Config(task="count", data=data, model=model, beta=beta, num_iterations=2, clip_low=0.2, clip_high=0.2)
    names = ("logp", "loss", "changed", "weights", "moved", "clipped", "capped")
    apart: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(STEPS):
        groups = sampled(prompts)
        for number, (_, done) in enumerate(groups):
            for each in done:
                each.weight = 1 / (PROMPTS * GROUP * len(each.ids))
                each.advantage *= not (idle and number % 2)
        batch = pack(full_groups(groups, run.encoder.image_token))
        with torch.no_grad():
            batch.values.ref_logp, batch.values.trainer_logp = reference(batch, 1.0)[0], full(batch, 1.0)[0]
            apart["logp"].append((run.policy(groups, 1.0) - batch.values.trainer_logp).abs().max().item())
        # Near the policy's own, so that the cap holds for some tokens and not for others
        batch.values.sampling_logp = batch.values.trainer_logp + 0.5 * torch.randn_like(batch.values.trainer_logp)
        done = [each for _, own in groups for each in own]
        for each, own in zip(done, batch.values.sampling_logp.split([len(each.ids) for each in done])):
            each.sampler_logp = own
        at_speed.record_logp(run.policy, [groups], run.settings, "old_logp")
        if run.reference is not None:
            at_speed.record_logp(run.reference, [groups], run.settings, "ref_logp")
        losses = [both_losses(run, full, groups, batch, cfg)]
        at_speed.update(run, groups[dist.get_rank() :: dist.get_world_size()])
        before = full.model.model.language_model.embed_tokens.weight.detach().clone()
        for _ in range(2):
            loss, sums = grpo.batch_loss(cfg, batch, full(batch, 1.0)[0])
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in full.parameters() if p.requires_grad], 1.0)
            full_optimizer.step()
            full_optimizer.zero_grad()
        losses.append(both_losses(run, full, groups, batch, cfg))
        apart["loss"].append(max(abs(ours - theirs) for ours, theirs in losses))
        apart["changed"].append(abs(losses[1][1] - losses[0][1]))
        apart["clipped"].append((sums["clip_ratio"] / sums["tokens"]).item())
        apart["capped"].append((sums["importance_capped"] / sums["tokens"]).item())
        apart["moved"].append((full.model.model.language_model.embed_tokens.weight - before).abs().max().item())
        trained = [(name, weight) for name, weight in run.policy.named_parameters() if weight.requires_grad]
        ours = {name: at_speed.full_tensor(weight) for name, weight in trained}
        theirs = dict(full.named_parameters())
        apart["weights"].append(max((ours[name] - theirs[name]).abs().max().item() for name in ours))
    return apart


def refused(model: str, data: str) -> str:
    """Return how the one file ends if an advantage of the first process is NaN; "" if it goes on."""
    run, prompts = prepared(model, data, beta=0.0)
    groups = sampled(prompts)
    groups[0][1][0].advantage = math.nan
    try:
        at_speed.update(run, groups[dist.get_rank() :: dist.get_world_size()])
    except SystemExit as error:
        return str(error) if all(whole.isfinite().all() for whole in run.policy.parameters()) else "spoilt"
    return ""


def main(model: str, data: str, result: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    apart = [compare(model, data, beta=0.02, idle=False), compare(model, data, beta=0.0, idle=True)]
    found = {"apart": apart, "refused": refused(model, data)}
    if dist.get_rank() == 0:
        pathlib.Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
