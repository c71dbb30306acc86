"""A reference that follows the policy: --plugin examples/moving_reference.py --beta 0.01."""

from dataclasses import dataclass

from common.distributed import local_tensor
from policy.sharding import AFTER_UPDATE


@dataclass
class Flags:
    reference_rate: float = 0.01
    """How far the reference moves towards the policy after each update, as a fraction."""


def follow(policy, reference, updates, cfg):
    for old, new in zip(reference.parameters(), policy.parameters()):
        if new.requires_grad:
            local_tensor(old).lerp_(local_tensor(new).to(old.device), cfg.reference_rate)


AFTER_UPDATE["follow"] = follow
