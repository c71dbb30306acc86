"""The policy: load a model, freeze or train its vision tower, and wrap it in `Policy`, which takes a packed batch and
returns token log-probabilities."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from common import console
from common.errors import UserError
from common.records import Prompt
from common.templates import answer_end
from config import LORA_ALPHA, PolicyFlags
from packing import PackedBatch
from policy.base_files import LM_HEAD, reading, stored_tensors
from policy.families import find_family, language_model, load_preprocessors, routers, vision_blocks, vision_parts
from policy.forward import enable_packed_forward, image_features, next_token_logits, token_logprobs
from policy.lora import adapted_layers, continue_adapter, has_adapter, new_adapter, without_dropout

FEATURE_CACHE_BYTES = 4 * 2**30  # maximum size of the image features that a process keeps in host memory
PIXEL_VALUES_AT_ONCE = 32768 * 1176  # 32,768 patches of Qwen2.5-VL
SAFELY = {"trust_remote_code": False, "weights_only": True}  # never run the folder's own code or pickles


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype named `dtype`; for "auto", bfloat16 on a GPU and float32 on a CPU."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Policy(nn.Module):
    """A model whose forward method takes a packed batch and returns token log-probabilities.

    FSDP2 shards each parameter as part of a module, and gathers it only while that module's forward method runs.
    Everything that uses the embedding or the lm_head therefore runs inside this module's forward method.
    """

    def __init__(self, model: transformers.PreTrainedModel):
        super().__init__()
        self.model = model
        self.keep_unsharded = False
        """Whether layers stay gathered between micro-batches; see `memory.choose_micro_batch_size`."""
        self.num_shards = 1
        """Number of processes that share one copy of the weights; see `PolicyFlags.sharding`."""

    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (C,) and entropies (C,) of the completion tokens; see `token_logprobs`."""
        return token_logprobs(self.model, batch, temperature, entropy_gradient)

    def next_token_logits(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        """Call `forward.next_token_logits` as a second forward method, before which FSDP gathers weights, too."""
        return next_token_logits(self.model, **inputs)


def num_weights(policy: Policy) -> int:
    """Return the number of weights of the model without adapters, as in the sampler's copy."""
    weights = (parameter for name, parameter in policy.named_parameters() if ".lora_" not in name)
    return sum(getattr(weight, "quant_state", weight).shape.numel() for weight in weights)  # 4-bit weights are packed


def load_model(
    name: str,
    dtype: torch.dtype,
    four_bit_device: torch.device | None = None,
    to_shard: bool = False,
    config: transformers.PreTrainedConfig | None = None,
) -> transformers.PreTrainedModel:
    """Load the causal or image-text model saved at `name` on the CPU.

    `four_bit_device`: load the model on this device instead, with the linear layers of the decoder stack in 4 bits.
    `to_shard`: only the main process reads the weights. The other processes get an empty model on the meta device,
    which `apply_fsdp` fills. `config`: the model's, if it is loaded. Raises UserError if the model cannot be loaded.
    """
    options: dict[str, object] = {"dtype": dtype, "attn_implementation": "sdpa"}
    config = config or load_config(name)
    if to_shard and not console.is_main():
        return empty_model(name, config, **options)
    if four_bit_device is not None:
        options |= {"quantization_config": four_bit_config(dtype, config), "device_map": {"": four_bit_device}}
    check_tensors(name, config)
    with reading(name, "weights"):
        model = auto_class(config).from_pretrained(name, config=config, **SAFELY, **options)
    if not ties_lm_head(model) and ties_lm_head(
        empty_model(name, config)
    ):  # other processes load it as the config says
        raise UserError(
            f"cannot load the model {name!r}: its files hold an lm_head of its own, but its config ties it to the "
            "embedding: set tie_word_embeddings to false in its config.json, also in text_config"
        )
    for module in model.modules() if four_bit_device else ():
        # On some CPUs, bitsandbytes would repack 4-bit weights in evaluation mode, in a format that cannot be trained.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def empty_model(
    name: str, config: transformers.PreTrainedConfig | None = None, **options: object
) -> transformers.PreTrainedModel:
    """Return the model saved at `name` on the meta device, without its weights. `config`: its own, if it is loaded."""
    config = config or load_config(name)
    with reading(name, "config.json"), torch.device("meta"):
        return auto_class(config).from_config(config, **options)


def ties_lm_head(model: transformers.PreTrainedModel) -> bool:
    """Return whether the lm_head shares the weight of the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def check_saved_model(folder: str) -> None:
    """Raise UserError unless the model, tokenizer and image processor in `folder` can be loaded.

    The names and shapes of the weights are checked, but not their values.
    """
    config = load_config(folder)
    check_tensors(folder, config)
    load_preprocessors(folder, config)


def check_tensors(name: str, config: transformers.PreTrainedConfig) -> None:
    """Raise UserError unless the files of the model at `name` have exactly the tensors that `config` asks for.

    Only names and shapes are read. transformers would only warn, and fill a missing tensor with random numbers. Tied
    weights are not reported as missing.
    """
    empty = {"device_map": {"": "meta"}, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with reading(name, "config.json and weights"):
        model, report = auto_class(config).from_pretrained(name, config=config, **SAFELY, **empty)
    buffers = {buffer for buffer, _ in model.named_buffers()}  # old releases saved buffers that are now computed
    for problem, keys in {
        "the files lack": set(report["missing_keys"]),
        "a different shape in the files:": {key for key, *_ in report["mismatched_keys"]},
        "the model does not have": set(report["unexpected_keys"]) - buffers,
    }.items():
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise UserError(
                f"cannot load the model {name!r}: {problem} {', '.join(sorted(keys)[:3])}{more}; download it again, or "
                "correct its config.json"
            )


def load_config(name: str) -> transformers.PreTrainedConfig:
    """Load the configuration of the model at `name`.

    Weights that were saved quantised are refused: they can neither be trained nor merged with an adapter.
    """
    config = read_config(name)
    if _has_untold_lm_head(config, name):
        untie(config)
    return config


def read_config(name: str) -> transformers.PreTrainedConfig:
    """Like `load_config`, but read no weights, which may still have to be downloaded from the hub."""
    with reading(name, "config.json"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        find_family(config, name)
        if getattr(config, "quantization_config", None) is not None:
            advice = "give the original model instead (--load_in_4bit quantises it while loading)"
            raise UserError(f"{name!r} was saved quantised: {advice}")
        text = config.get_text_config()
        for setting in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
            if getattr(text, setting, None):
                raise UserError(f"{name!r} has {setting} in its config.json, which is not supported")
        rope = getattr(text, "rope_parameters", None) or {}
        kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
        if kinds & {"dynamic", "longrope"}:
            raise UserError(f"{name!r} has rotary embeddings that depend on the length of a batch: not supported")
    with reading(name, "generation_config.json"):  # transformers would ignore a damaged one, with its stop tokens
        if Path(name, "generation_config.json").is_file():
            transformers.GenerationConfig.from_pretrained(name)
    return config


def _has_untold_lm_head(config: transformers.PreTrainedConfig, name: str) -> bool:
    """Return whether the model at `name` has an lm_head of its own that its config.json does not mention.

    Releases of transformers before 5, which wrote such files, do not tie it; later ones do.
    """
    written, _ = transformers.PreTrainedConfig.get_config_dict(name)
    if not config.tie_word_embeddings or "tie_word_embeddings" in written:
        return False
    if (written.get("text_config") or {}).get("tie_word_embeddings"):
        return False
    return any(name.endswith(LM_HEAD) for tensors in stored_tensors(name).values() for name in tensors)


def untie(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """Give the lm_head of models with this `config` a weight of its own. Return `config`."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    return config


def auto_class(config: transformers.PreTrainedConfig) -> type[Any]:
    """Return the transformers Auto class that builds models from `config`."""
    multimodal = type(config) in transformers.AutoModelForImageTextToText._model_mapping
    return transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM


def four_bit_config(dtype: torch.dtype, config: transformers.PreTrainedConfig) -> transformers.BitsAndBytesConfig:
    """Return the settings of QLoRA (arXiv:2305.14314): nf4 with double quantisation, computing in `dtype`.

    The lm_head and the routers are not quantised. The vision tower and the projector are not quantised either, because
    the sampler uses their features. Routed experts stay in `dtype`, since bitsandbytes quantises linear layers only.
    """
    family = find_family(config)
    vision = [f"model.{name}" for name in family.vision.modules] if family.vision else []  # matched from the start
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", *vision, family.router or "router"],
    )


def is_quantised(model: nn.Module) -> bool:
    """Return whether `model` holds weights in 4 bits."""
    return any(hasattr(parameter, "quant_state") for parameter in model.parameters())


def load_policy(name: str, flags: PolicyFlags, device: torch.device, to_shard: bool = False) -> Policy:
    """Load the model at `name` as a policy with float32 master weights.

    The vision tower is frozen unless `flags.train_vision` is set. With an adapter, only the adapter is trained and kept
    in float32; the base model is in the compute dtype or in 4 bits. `to_shard`: see `load_model`; a 4-bit model is
    always loaded in full by every process.
    """
    config = load_config(name)
    if check := find_family(config).check:
        check(config, device)
    dtype = compute_dtype(flags.dtype, device) if flags.has_adapter else torch.float32
    model = load_model(name, dtype, device if flags.load_in_4bit else None, to_shard and not flags.load_in_4bit, config)
    _set_trained(model, flags)
    enable_packed_forward(model, compiled=flags.compile and device.type == "cuda")
    model.train()
    return Policy(model)


def empty_policy(config: transformers.PreTrainedConfig, flags: PolicyFlags) -> Policy:
    """Return a policy with this `config` as `load_policy` would on a GPU, but without weights: for its sizes only."""
    dtype = compute_dtype(flags.dtype, torch.device("cuda")) if flags.has_adapter else torch.float32
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
        if flags.load_in_4bit:
            for layer in language_model(model).modules():
                if isinstance(layer, nn.Linear):
                    whole, packed = layer.weight, torch.empty(layer.weight.numel() // 2, 1, dtype=torch.uint8)
                    layer.weight = nn.Parameter(packed, requires_grad=False)
                    layer.weight.quant_state = whole
        _set_trained(model, flags)
    return Policy(model)


def _set_trained(model: transformers.PreTrainedModel, flags: PolicyFlags) -> None:
    """Add the adapter that `flags` ask for, and freeze what is not trained."""
    if flags.has_adapter:
        if flags.adapter:
            continue_adapter(model, flags.adapter, flags.lora_dropout)
        else:
            alpha, dropout = flags.lora_alpha or LORA_ALPHA, flags.lora_dropout or 0.0
            new_adapter(model, flags.lora_rank, alpha, flags.train_vision, dropout, experts=flags.lora_experts)
    for parameter in vision_parameters(model):
        parameter.requires_grad_(parameter.requires_grad and flags.train_vision)
    for router in routers(model).values():
        router.requires_grad_(flags.train_router and not flags.has_adapter)


def check_trained(policy: Policy, flags: PolicyFlags) -> None:
    """Print what is frozen, and a note if --train_vision or --train_router has no effect.

    Raises UserError if `flags` leave no adapter weight to train, or nothing for --vision_rate.
    """
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"--adapter {flags.adapter}: it adapts only the vision tower, which is frozen: add --train_vision"
        )
    console.log(_trained_and_frozen(policy.model))
    if flags.train_vision and not trains_vision(policy.model):
        unadapted = has_adapter(policy.model) and vision_parameters(policy.model)
        reason = "the adapter does not adapt a vision tower" if unadapted else "the model has no vision tower"
        if flags.vision_rate is not None:
            raise UserError(f"--vision_rate {flags.vision_rate:g}: {reason}: leave it out")
        console.log(f"--train_vision has no effect: {reason}")
    if flags.train_router and not routers(policy.model):
        console.log("--train_router has no effect: the model has no routers")


def _trained_and_frozen(model: transformers.PreTrainedModel) -> str:
    """Return one line that says which parts of `model` are trained and which are frozen."""
    if has_adapter(model):
        stacks = (language_model(model).layers, vision_blocks(model))
        layers = {name for stack in stacks for layer in stack for name in adapted_layers(layer)}
        return f"trained: adapter of {', '.join(sorted(layers))}; frozen: everything else"
    parts = vision_parts(model) | {find_family(model.config).router: module for module in routers(model).values()}
    frozen = [name for name, part in parts.items() if not any(p.requires_grad for p in part.parameters())]
    return f"frozen: {', '.join(frozen) or 'nothing'}"


def vision_parameters(model: transformers.PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower and the projector; an empty list for a text model."""
    return [parameter for part in vision_parts(model).values() for parameter in part.parameters()]


def trains_vision(model: transformers.PreTrainedModel) -> bool:
    """Return whether training changes image features: the tower, the projector or an adapter in them is trained."""
    return any(parameter.requires_grad for parameter in vision_parameters(model))


@torch.no_grad()
def cache_image_features(
    policy: Policy, prompts: list[Prompt], feature_cache: dict[bytes, Tensor], at_once: int = 0
) -> None:
    """Set each prompt's `features` to the features of its images, if the vision tower is frozen; else do nothing.

    The sampler, the reference and all updates of a step share these features. `feature_cache` keeps them in host memory
    for later steps, keyed by image digest, up to `FEATURE_CACHE_BYTES`.

    `at_once`: maximum number of pixel values per call of the vision tower; 0 means `PIXEL_VALUES_AT_ONCE` on a GPU and
    those of one prompt on a CPU.
    With one prompt per call, a prompt's features do not depend on the other prompts. The features are then
    bit-for-bit identical, even after a resume.
    """
    parameters = vision_parameters(policy.model)
    if not parameters or trains_vision(policy.model):
        return
    at_once = at_once or (PIXEL_VALUES_AT_ONCE if parameters[0].is_cuda else 1)
    uncached = list({p.image_digest: p for p in prompts if p.vision and p.image_digest not in feature_cache}.values())
    while uncached:
        batch: list[Prompt] = []
        values = 0
        while uncached and (not batch or values + uncached[-1].vision["pixel_values"].numel() <= at_once):
            batch.append(uncached.pop())
            values += batch[-1].vision["pixel_values"].numel()
        device = parameters[0].device
        vision = {name: torch.cat([p.vision[name].to(device) for p in batch]) for name in batch[0].vision}
        with without_dropout(policy):
            features = image_features(policy.model, vision)
        for prompt, prompt_features in zip(batch, features.split([len(p.image_indices) for p in batch])):
            feature_cache[prompt.image_digest] = prompt_features.to("cpu", non_blocking=True)
    if parameters[0].is_cuda:
        torch.cuda.synchronize()
    for prompt in prompts:
        prompt.features = feature_cache.get(prompt.image_digest)
    while sum(features.nbytes for features in feature_cache.values()) > FEATURE_CACHE_BYTES:
        del feature_cache[next(iter(feature_cache))]  # the oldest entry


def stop_tokens(
    generation: transformers.GenerationConfig | dict | None,
    config: transformers.PreTrainedConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> list[int]:
    """Return all tokens that end a completion, as listed in the generation config, model config and tokenizer.

    The token with which the chat template ends an answer (Qwen2.5: <|im_end|>) is one of them, too: completions end
    with it here, and a base model may list only another token. Raises UserError if one of them is not a number.
    """
    tokens = [tokenizer.eos_token_id]
    for source in (generation, config, getattr(config, "text_config", None)):
        eos = source.get("eos_token_id") if isinstance(source, dict) else getattr(source, "eos_token_id", None)
        tokens += eos if isinstance(eos, list) else [eos]
    if odd := [token for token in tokens if token is not None and type(token) is not int]:
        raise UserError(
            f"the model's eos_token_id {odd[0]!r} is no token: correct generation_config.json or config.json"
        )
    return sorted({token for token in (*tokens, end_token(tokenizer)) if token is not None})


def end_token(tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends an answer; None if there is no template, or no such token."""
    with contextlib.suppress(ValueError):  # the template refuses answers
        end = tokenizer.chat_template and answer_end(tokenizer)[1]
        return tokenizer.convert_tokens_to_ids(end) if end else None
    return None
