"""After each sync, compare every weight in vLLM with the trainer's: --plugin parts/check_sync.py.

Imports the core. Nothing asks for it but that flag.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from common.errors import RunStopped, UserError
from policy.model import Policy
from policy.sharding import sampler_weights
from sampling.vllm_engine import VLLMEngine

sync = VLLMEngine.sync_weights


def checked_sync(engine: VLLMEngine, policy: Policy) -> None:
    """Sync the weights of `policy`, and raise RunStopped if vLLM has others afterwards."""
    if engine.flags.tensor_parallel > 1:
        raise UserError("check_sync needs full weights in each process: leave it out or set --tensor_parallel to 1")
    sync(engine, policy)
    unused = engine.vision.unused if engine.vision else ""
    dtype = engine.llm.model_config.dtype
    sent = ((name, weight.to(dtype)) for name, weight in sampler_weights(policy))
    engine.llm.apply_model(lambda model: check_weights(sent, model, unused))


def check_weights(sent: Iterable[tuple[str, Tensor]], model: torch.nn.Module, unused: str = "") -> None:
    """Raise RunStopped if a `sent` weight is missing from vLLM's `model` or differs, or if its lm_head was not sent.

    Weights of the module `unused` may be missing; see `policy.families.Vision.unused`.
    """
    vllm_weights = dict(unfused_weights(model))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = mapper and dataclasses.replace(mapper, orig_to_new_stacked={})  # without the names of fused weights
    for name, weight in sent:
        vllm_name = mapper._map_name(name) if mapper else name
        synced = vllm_weights.pop(vllm_name, None)
        if synced is None and unused and f".{unused}." in name:
            continue
        if synced is None or not torch.equal(synced[: len(weight)], weight.to(synced.dtype)):
            problem = "is missing in vLLM" if synced is None else "differs between vLLM and the trainer"
            raise RunStopped(f"check_sync: {name} {problem} after the sync; --engine hf samples without vLLM", 1)
    if any(name.endswith("lm_head.weight") for name in vllm_weights):  # vLLM has one, the trainer does not
        raise RunStopped(
            "check_sync: the trainer's lm_head is the embedding, vLLM's is not: set tie_word_embeddings in the "
            "text_config of the model's config.json, too, where vLLM reads it for Qwen3.5",
            1,
        )


def unfused_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every weight of vLLM's `model`, with fused weights also split as transformers has them.

    The names are vLLM's, apart from their last part.
    """
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        yield name, weight
        owner = name.rpartition(".")[0]
        experts = owner.removesuffix(".routed_experts")
        if ".qkv_proj." in name:
            layer = modules[owner]
            heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            splits = zip(("q_proj", "k_proj", "v_proj"), weight.split([h * layer.head_size for h in heads]))
            yield from ((name.replace("qkv_proj", projection), split) for projection, split in splits)
        elif ".gate_up_proj." in name:
            splits = zip(("gate_proj", "up_proj"), weight.chunk(2))
            yield from ((name.replace("gate_up_proj", projection), split) for projection, split in splits)
        elif ".in_proj_qkvz." in name:  # Gated DeltaNet
            values = modules[owner.rpartition(".")[0]].value_dim
            splits = zip(("in_proj_qkv", "in_proj_z"), weight.split([len(weight) - values, values]))
            yield from ((name.replace("in_proj_qkvz", projection), split) for projection, split in splits)
        elif ".in_proj_ba." in name:
            splits = zip(("in_proj_b", "in_proj_a"), weight.chunk(2))
            yield from ((name.replace("in_proj_ba", projection), split) for projection, split in splits)
        elif name.endswith("w13_weight"):  # (experts, 2 x intermediate size, hidden size); Aria has it transposed
            yield from ((f"{experts}.gate_up_proj", weight), (f"{experts}.fc1.weight", weight.transpose(1, 2)))
        elif name.endswith("w2_weight"):
            yield from ((f"{experts}.down_proj", weight), (f"{experts}.fc2.weight", weight.transpose(1, 2)))


VLLMEngine.sync_weights = checked_sync  # type: ignore[assignment]
