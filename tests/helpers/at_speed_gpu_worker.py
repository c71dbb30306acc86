"""Compare log-probabilities of lesson/grpo_at_speed.py and of the full code on a GPU, both as they train there.

    torchrun --nproc_per_node 1 tests/helpers/at_speed_gpu_worker.py MODEL ROWS.jsonl RESULT.json

The layers compute in bfloat16 and are compiled. The full code in float32 tells how far bfloat16 itself is away.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

from lesson import grpo_at_speed as at_speed
from packing import pack
from policy.forward import enable_packed_forward
from policy.model import Policy, load_model
from policy.sharding import apply_fsdp
from tests.helpers.at_speed_worker import PROMPTS, full_groups, full_policy, sampled


@torch.no_grad()
def main(model: str, data: str, result: str) -> None:
    device = torch.device("cuda")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    run = at_speed.prepare(at_speed.Settings(model=model, data=data), device)
    loaded = load_model(model, torch.float32)
    enable_packed_forward(loaded, compiled=True)
    loaded.model.visual.requires_grad_(False)
    full = apply_fsdp(Policy(loaded), device, torch.bfloat16, "none")
    rows = [json.loads(line) for line in pathlib.Path(data).read_text().splitlines()][:PROMPTS]
    prompts = [run.encoder(row) for row in rows]
    groups = sampled(prompts)
    batch = pack(full_groups(groups, run.encoder.image_token)).to(device)
    exact = full_policy(model).to(device)(batch, 1.0)[0]
    at_speed.see(run.policy, prompts)
    ours, theirs = run.policy(groups, 1.0), full(batch, 1.0)[0]

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one - other).abs().mean().item()

    differences = {"files": apart(ours, theirs), "one": apart(ours, exact), "full": apart(theirs, exact)}
    pathlib.Path(result).write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
