"""What verl 0.9.1 lacks for workload W1: a coin flip as its reward, a frozen vision tower, kernels that start soon, and
an lm_head that its fused kernels can read if it is not tied to the embeddings (7B).

apps/bench/peer_verl.py names this file to verl, as `reward.custom_reward_function` and as `model.external_lib`.
"""

import functools
import pathlib
import random
import sys

from verl.utils import fsdp_utils
from verl.workers.engine.fsdp import transformer_impl

sys.path.append(str(pathlib.Path(__file__).parents[2]))


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 0 or 1 at random."""
    return float(random.random() < 0.5)


def prepare_models() -> None:
    """Let verl freeze the tower of each model that it builds: its engine does not read `actor.freeze_vision_tower`.

    Kernels of flash-linear-attention get one variant each, or verl would wait for minutes while all are compiled.
    """
    build = transformer_impl.FSDPEngine._build_module

    @functools.wraps(build)
    def build_prepared(engine):
        module = build(engine)
        for name, parameter in module.named_parameters():
            if "visual" in name:
                parameter.requires_grad_(False)
        if module.config.model_type == "qwen3_5":
            from parts.families import delta_net

            delta_net.load_kernels()
        return module

    transformer_impl.FSDPEngine._build_module = build_prepared


def leave_lm_head_to_the_root() -> None:
    """Let FSDP gather the lm_head together with the root module.

    verl would shard it as a module of its own. Its fused kernels read the weight without calling the module, so FSDP
    would not gather it.
    """
    select = fsdp_utils._select_fsdp2_wrap_targets

    @functools.wraps(select)
    def select_others(model, classes):
        return [module for module in select(model, classes) if module is not model.get_output_embeddings()]

    fsdp_utils._select_fsdp2_wrap_targets = select_others


prepare_models()
leave_lm_head_to_the_root()
