"""Run grpo.py with optimizers, or a reference that moves, of one's own, as a plugin adds them.

    python tests/helpers/own_parts.py PARTS FLAGS

PARTS are names of the functions below, separated by commas.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
import torch

import grpo
from common import cli
from common.distributed import local_tensor
from policy.optimizer import OPTIMIZERS, make_adamw, make_schedule
from policy.sharding import AFTER_UPDATE


class CountingSGD(torch.optim.SGD):
    """SGD that counts its steps in its groups, where some optimizers keep what they have learned."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["momentum"] = 0.9 - 0.1 / group["steps"]


def two_optimizers(policy, flags, updates):
    """AdamW for the matrices, SGD with momentum for the rest."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    sgd = CountingSGD([p for p in trained if p.ndim == 1], lr=10 * flags.learning_rate, momentum=0.8)
    adamw = make_adamw(policy, flags, updates, [p for p in trained if p.ndim > 1])
    return [*adamw, (sgd, make_schedule(sgd, flags, updates))]


def moving_average(policy, reference, updates, *_):
    """Let the reference follow the policy."""
    for old, new in zip(reference.parameters(), policy.parameters()):
        if new.requires_grad:
            local_tensor(old).lerp_(local_tensor(new), 0.25)


def copy_every_second(policy, reference, updates, *_):
    """Set the reference to the policy after every second update."""
    if updates % 2 == 0:
        for old, new in zip(reference.parameters(), policy.parameters()):
            local_tensor(old).copy_(local_tensor(new))


if __name__ == "__main__":
    for name in sys.argv.pop(1).split(","):
        if name == "two_optimizers":
            OPTIMIZERS["default"] = two_optimizers
        else:
            AFTER_UPDATE[name] = globals()[name]
    cli.run(grpo.main, cli.parse(grpo.Config))
