"""Save the weights of a policy that the benches make, sharded as they are made, and of its reference.

    torchrun --nproc_per_node 2 tests/helpers/random_weights_worker.py FOLDER OUT.pt

tests/test_bench.py runs this script in one and in two processes, and compares the weights.
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import policy.model
from apps.bench import speed
from common import console, distributed
from config import PolicyFlags
from policy.sharding import apply_fsdp, load_reference


def main(folder: str, out: str) -> None:
    cpu, flags = torch.device("cpu"), PolicyFlags(compile=False)
    speed.prepare(pathlib.Path(folder), "tiny_moe", set(), 0)
    model = f"{folder}/tiny_moe"
    loaded = {}
    for kind, each in (("policy", flags), ("adapter", PolicyFlags(compile=False, lora_rank=4, lora_experts=True))):
        loaded[kind] = policy.model.load_policy(model, each, cpu, to_shard=True)
        base = [parameter for name, parameter in loaded[kind].named_parameters() if ".lora_" not in name]
        assert all(parameter.is_meta for parameter in base), "no process may hold a weight before it is sharded"
        apply_fsdp(loaded[kind], cpu, torch.float32)
    loaded["reference"] = load_reference(model, flags, cpu, loaded["policy"])
    weights = {
        kind: {
            name: distributed.full_tensor(p.detach()) for name, p in [*each.named_parameters(), *each.named_buffers()]
        }
        for kind, each in loaded.items()
    }
    if console.is_main():
        torch.save(weights, out)
    distributed.shutdown()


main(*sys.argv[1:])
