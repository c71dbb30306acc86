"""What verl 0.9.1 lacks for workload W1: a coin flip as its reward, and a frozen vision tower.

bench/peer_verl.py names this file to verl, as `reward.custom_reward_function` and as `model.external_lib`.
"""

import functools
import random

from verl.workers.engine.fsdp import transformer_impl


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 0 or 1 at random."""
    return float(random.random() < 0.5)


def freeze_vision_tower() -> None:
    """Make verl freeze the tower of each model that it builds: its engine does not read `actor.freeze_vision_tower`."""
    build = transformer_impl.FSDPEngine._build_module

    @functools.wraps(build)
    def build_frozen(engine):
        module = build(engine)
        for name, parameter in module.named_parameters():
            if "visual" in name:
                parameter.requires_grad_(False)
        return module

    transformer_impl.FSDPEngine._build_module = build_frozen


freeze_vision_tower()
