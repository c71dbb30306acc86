"""Policies: load one, freeze or train its vision tower, shard it with FSDP2, hand out its whole weights."""

import contextlib
import sys
from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common import console
from common.errors import UserError
from common.records import Prompt
from config import PolicyFlags
from packing import PackedBatch
from policy.forward import enable_packed_forward, token_logprobs, vision_features
from policy.lora import continue_adapter, has_adapter, new_adapter

FEATURE_CACHE_BYTES = 4 * 2**30  # bytes of image features that a process keeps on the host


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type to compute in: `dtype` by name, or for "auto" bfloat16 on a GPU and float32 on a CPU."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Policy(nn.Module):
    """A model behind one forward: packed batch in, token log-probabilities out.

    FSDP2 gathers a parameter only around the forward of the module it was sharded with, so whatever touches the
    embedding and the lm_head runs inside this one.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.keep_unsharded = False
        """whether layers stay gathered from one micro-batch to the next; see `PolicyFlags.gather`"""

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(C,) log-probabilities and (C,) entropies of `batch`'s completion tokens; see `token_logprobs`."""
        # First, as where the images are real: every process must gather the same shards in the same order.
        nothing = 0.0 * self._blank_image() if batch.dummy_vision else 0.0
        logp, entropy = token_logprobs(self.model, batch, temperature)
        return logp + nothing, entropy

    def _blank_image(self) -> Tensor:
        """The vision tower on the smallest blank image: joins the collectives of the ranks that have real ones."""
        config = self.model.config.vision_config
        merge = config.spatial_merge_size
        device = next(self.parameters()).device
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(merge * merge, values, device=device)
        out = self.model.model.visual(pixels, grid_thw=torch.tensor([[1, merge, merge]], device=device))
        deepstack = getattr(out, "deepstack_features", None) or []  # Qwen3-VL: these have parameters of their own
        return out.pooler_output.sum() + sum(feature.sum() for feature in deepstack)


def load_model(
    name: str, dtype: torch.dtype, quantised_on: torch.device | None = None, to_shard: bool = False
) -> PreTrainedModel:
    """The causal or image-text model saved at `name`, on the CPU; or on `quantised_on`, the linear layers of its
    decoder stack in 4 bits. `to_shard`: the main process alone reads it, the others' is empty (meta) until
    `apply_fsdp`. Raises UserError when it cannot be loaded."""
    options: dict[str, object] = {"dtype": dtype, "attn_implementation": "sdpa"}
    config = load_config(name)
    if to_shard and not console.is_main():
        with _named(name), torch.device("meta"):
            return auto_class(config).from_config(config, **options)
    if quantised_on is not None:
        options |= {"quantization_config": four_bit(dtype), "device_map": {"": quantised_on}}
    with _named(name):
        return auto_class(config).from_pretrained(name, **options)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of the model at `name`. Raises UserError when it cannot be read and when the weights were saved
    quantised, which can neither be trained nor be added to."""
    with _named(name):
        config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{name!r} was saved quantised: name the model it was made from (--load_in_4bit quantises it on the way)"
        )
    return config


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What goes wrong with the files of the model at `name`, in one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise UserError(
            f"cannot load a model from {name!r} ({str(error).splitlines()[0][:160]}): a folder in Hugging Face layout "
            "or a hub name within reach is needed"
        ) from None


def auto_class(config: PreTrainedConfig) -> type:
    """The Auto class that makes a model of `config`."""
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def four_bit(dtype: torch.dtype) -> BitsAndBytesConfig:
    """nf4 with double quantisation (QLoRA, arXiv:2305.14314), computing in `dtype`; the vision tower, whose features
    the sampler shares, and the lm_head stay as they are."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["visual", "lm_head"],
    )


def load_policy(name: str, flags: PolicyFlags, device: torch.device, to_shard: bool = False) -> Policy:
    """The model at `name` as a policy with float32 master weights; its vision tower is frozen unless `train_vision`.

    With an adapter that alone is trained and float32, and the model is in the compute type or in 4 bits. `to_shard`:
    see `load_model`; a 4-bit model is whole everywhere.
    """
    dtype = compute_dtype(flags.dtype, device) if flags.has_adapter else torch.float32
    if flags.load_in_4bit:
        model = load_model(name, dtype, quantised_on=device)
    else:
        model = load_model(name, dtype, to_shard=to_shard)
    if flags.has_adapter:
        if flags.adapter:
            continue_adapter(model, flags.adapter)
        else:
            new_adapter(model, flags.lora_rank, flags.lora_alpha, flags.train_vision)
    for parameter in vision_parameters(model):
        parameter.requires_grad_(parameter.requires_grad and flags.train_vision)
    enable_packed_forward(model, compiled=flags.compile and device.type == "cuda")
    model.train()
    return Policy(model)


def check_trained(policy: Policy, flags: PolicyFlags) -> None:
    """Raise UserError when `flags` leave nothing of an adapter to train, and say it when they ask for what it lacks."""
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"--adapter {flags.adapter}: it adapts the vision tower alone, nothing to train: give --train_vision"
        )
    blind = has_adapter(policy.model) and not any(".visual." in name for name in trained)
    if flags.train_vision and blind and console.is_main():
        print("--train_vision: the adapter has no part in a vision tower, which stays as it is", file=sys.stderr)


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of the vision tower, its merger included; none for a text model."""
    tower = getattr(model.model, "visual", None)
    return list(tower.parameters()) if tower is not None else []


@torch.no_grad()
def cache_image_features(policy: Policy, prompts: list[Prompt], kept: dict[bytes, Tensor], at_once: int = 0) -> None:
    """Give each prompt the features of its images when the vision tower is frozen: once for the sampler, the reference
    and all updates, and once a run for those that `kept`, on the host, has room for. `at_once`: patches; on a CPU one
    prompt's, so that the last bits are the same in any company, and so after a resume."""
    visual = getattr(policy.model.model, "visual", None)
    if visual is None or any(parameter.requires_grad for parameter in visual.parameters()):
        return
    at_once = at_once or (32768 if next(visual.parameters()).is_cuda else 1)
    new = list({p.image_digest: p for p in prompts if p.vision and p.image_digest not in kept}.values())
    while new:
        batch, patches = [], 0
        while new and (not batch or patches + len(new[-1].vision["pixel_values"]) <= at_once):
            batch.append(new.pop())
            patches += len(batch[-1].vision["pixel_values"])
        inputs = [torch.cat([p.vision[name] for p in batch]) for name in ("pixel_values", "image_grid_thw")]
        device = next(visual.parameters()).device
        features = vision_features(visual, *(x.to(device) for x in inputs)).cpu()
        merged = visual.config.spatial_merge_size**2
        sizes = [len(prompt.vision["pixel_values"]) // merged for prompt in batch]
        kept |= {prompt.image_digest: part.clone() for prompt, part in zip(batch, features.split(sizes))}
    for prompt in prompts:
        prompt.features = kept.get(prompt.image_digest)
    while sum(part.nbytes for part in kept.values()) > FEATURE_CACHE_BYTES:
        del kept[next(iter(kept))]  # the oldest


def saved_dtype(name: str) -> torch.dtype:
    """The dtype the model at `name` was saved in: what an export of its trained weights is saved in again."""
    dtype = AutoConfig.from_pretrained(name).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def stop_tokens(
    generation: GenerationConfig | dict | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Every token that ends a completion, from the generation config, the model's config and the tokenizer."""
    found = {tokenizer.eos_token_id}
    for source in (generation, config, getattr(config, "text_config", None)):
        eos = source.get("eos_token_id") if isinstance(source, dict) else getattr(source, "eos_token_id", None)
        found |= set(eos if isinstance(eos, list) else [eos])
    return sorted(token for token in found if token is not None)
