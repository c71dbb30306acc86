"""LoRA adapters (arXiv:2106.09685): a few trained parameters on top of a frozen base model.

    adapted weight = W + scaling B A        W (O, D) frozen, A (r, D) and B (O, r) trained
    scaling        = α / r, with rslora (arXiv:2312.03732) α / √r

Routed experts lie in one tensor (experts, out, in). If they are adapted, each expert has its own A and B. PEFT keeps
all A in one matrix and all B in another, and adds the products to the tensor before it is used.

The sampler receives adapted weights, which are recomputed from the base for every sync (`adapted_weights`). Nothing is
ever merged into the base, so rounding errors do not accumulate. The reference of the KL term is the same model with a
different adapter: the adapter that training started from, or none if training started with a new adapter. There is no
second copy of the base.
"""

import contextlib
import copy
import functools
import json
import math
import pathlib
import re
import reprlib
import warnings
from collections.abc import Callable, Iterator
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from common import console, distributed
from common.errors import UserError
from policy.base_files import module_finder
from policy.families import find_family, language_model, routed_experts, routers, vision_blocks

if TYPE_CHECKING:  # importing PEFT takes two seconds, so it is imported where it is needed
    from peft import LoraConfig, LoraModel

POLICY, REFERENCE = "policy", "reference"  # names of the trained adapter and of the adapter it started from
PLAIN_INITS = ("true", "false", "gaussian", "orthogonal", "eva", "mica")  # these initialise only A and B, not the base


def new_adapter(
    model: nn.Module, rank: int, alpha: float, vision: bool, dropout: float = 0.0, experts: bool = False
) -> None:
    """Add a new adapter to every linear layer of the decoder stack, apart from routers, and freeze the rest of `model`.

    `vision`: also adapt the linear layers of the vision tower's blocks. `dropout`: the probability with which an input
    of the adapter is dropped while `model` is in training mode. `experts`: also adapt the routed experts, without
    dropout. The adapter has no effect at first, because `B` is zero; `A` is random but the same on every process.
    Raises UserError if there are no `experts`.
    """
    from peft import LoraConfig

    layers = language_model(model).layers
    stacks = [layers, vision_blocks(model)] if vision else [layers]
    settings: dict[str, Any] = dict(r=rank, lora_alpha=alpha, lora_dropout=dropout)
    settings["target_modules"] = "|".join(_linear_layers(model, stack) for stack in stacks if stack)
    if experts:
        parameters = {name.partition(".")[2] for name in routed_experts(model)}
        if not parameters:
            raise UserError("--lora_experts: the model has no routed experts; leave out --lora_experts")
        settings["target_parameters"] = sorted(parameters)
    config = LoraConfig(**settings, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _inject(model, config, [POLICY])


def _linear_layers(model: nn.Module, stack: nn.ModuleList) -> str:
    """Return a pattern for the names of the linear layers in `stack`, a list of layers of `model`, without routers."""
    path = next(name for name, module in model.named_modules() if module is stack)
    excluded = routers(model).keys()
    names = [name for name, module in stack.named_modules(prefix=path) if isinstance(module, nn.Linear)]
    kinds = sorted({name.removeprefix(f"{path}.").partition(".")[2] for name in names if name not in excluded})
    return rf"{re.escape(path)}\.\d+\.({'|'.join(map(re.escape, kinds))})"


def continue_adapter(model: nn.Module, source: str, dropout: float | None = None) -> None:
    """Load the adapter saved at `source` into `model` twice: once to continue training, once frozen as the reference.

    `dropout` replaces the adapter's saved dropout probability; None keeps it.
    """
    config, tensors = read_adapter(source)
    check_tokens(source, model.name_or_path)
    if (base := config.base_model_name_or_path) != model.name_or_path:  # it may be the same base, moved or downloaded
        console.log(f"the adapter in {source} names {base or 'no model'} as its base; here, it is {model.name_or_path}")
    # The packed forward pass reads only the weights of these modules, without an adapter.
    unadapted = [f".{module}." for module in ("lm_head", find_family(model.config).router) if module]
    for key, tensor in tensors.items():
        is_linear = key.endswith((".lora_A.weight", ".lora_B.weight")) and tensor.ndim == 2
        if not is_linear or any(module in key for module in unadapted):
            problem = f"{key} cannot be continued: merge the adapter into its base with merge_lora.py"
            raise UserError(f"--adapter {source}: {problem} and train a new adapter with --lora_rank")
    if dropout and config.target_parameters:
        raise UserError(f"--adapter {source}: adapted experts work without dropout only; leave out --lora_dropout")
    config.lora_dropout = config.lora_dropout if dropout is None else dropout
    load_adapter(model, config, tensors, [POLICY, REFERENCE], source)


def load_adapter(
    model: nn.Module, config: "LoraConfig", tensors: dict[str, Tensor], names: list[str], source: str
) -> "LoraModel":
    """Add the adapter that `read_adapter` read from `source` to `model`, once under each of `names`.

    Returns PEFT's wrapper of `model`. Raises UserError if the adapter was made for a different base.
    """
    from peft import set_peft_model_state_dict

    try:
        config, tensors = _with_current_names(config, tensors, model, source)
        tuner = _inject(model, config, names)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise UserError(f"{source}/adapter_config.json has a wrong value ({str(error).splitlines()[0]})") from None
    for name in names:
        try:
            with warnings.catch_warnings(action="ignore"):  # warns about a model on the meta device
                loaded = set_peft_model_state_dict(model, tensors, name)
        except (KeyError, RuntimeError) as error:  # wrong shapes are listed line by line
            raise UserError(f"{source} was made for another base: {str(error).splitlines()[-1].strip()}") from None
        missing = [f"lacks {key}" for key in loaded.missing_keys if f".{name}." in f"{key}."]
        for problem in missing + [f"holds {key}" for key in loaded.unexpected_keys]:
            raise UserError(f"{source} does not fit its own adapter_config.json: it {problem}")
    return tuner


def _with_current_names(
    config: "LoraConfig", tensors: dict[str, Tensor], model: nn.Module, source: str
) -> tuple["LoraConfig", dict[str, Tensor]]:
    """Return copies of `config` and `tensors` with the module names of `model`, which may be newer than the saved ones.

    The config lists every adapted module by its full name, with its rank and α, because saved patterns match old names.
    """
    from peft.utils.other import get_pattern_key

    find, experts = module_finder(model), {id(weight) for weight in routed_experts(model).values()}
    renamed, ranks, alphas = {}, {}, {}
    for key, tensor in tensors.items():
        path = key.removeprefix("base_model.model.")
        match = re.fullmatch(r"(?P<module>.*?)(?P<wrapped>\.base_layer)?(?:^|\.)(?P<param>lora_.+|[^.]+)", path)
        saved = match["module"]
        module = find(saved)
        if module is None:
            raise UserError(f"{source} was made for another base: this base has no module for {path}")
        renamed[f"{module}{match['wrapped'] or ''}.{match['param']}"] = tensor
        of_experts = any(id(weight) in experts for weight in model.get_submodule(module).parameters(recurse=False))
        if match["param"] in ("lora_A.weight", "lora_embedding_A") and not of_experts:
            pattern = get_pattern_key(config.alpha_pattern, saved)
            ranks[module], alphas[module] = len(tensor), config.alpha_pattern.get(pattern, config.lora_alpha)
    if not renamed:
        raise UserError(f"{source} holds no LoRA weights: there is nothing to load with PEFT")
    config = copy.copy(config)
    config.target_modules = sorted(ranks)
    config.rank_pattern = {module: rank for module, rank in ranks.items() if rank != config.r}
    config.alpha_pattern = {module: alpha for module, alpha in alphas.items() if alpha != config.lora_alpha}
    config.modules_to_save = config.modules_to_save and [find(name) or name for name in config.modules_to_save]
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.init_lora_weights = True  # loading must not change the base
    return config, renamed


def _inject(model: nn.Module, config: "LoraConfig", names: list[str]) -> "LoraModel":
    """Add adapters called `names` to `model`. Only `POLICY` is active and trained."""
    from peft import LoraModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two adapters are intended
        for name in names:
            tuner = LoraModel(model, copy.copy(config), name)
    model.train(model.training)  # PEFT leaves the new dropout in training mode
    for layer in adapted_layers(model).values():
        layer._active_adapter = [POLICY]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{POLICY}." in name)
        if ".lora_" in name:
            parameter.data = parameter.data.float()  # master weights
    return tuner


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's adapted layers, keyed by their names in the base; for experts, by those of their parameters."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            experts = f".{module.parameter_name}" if hasattr(module, "parameter_name") else ""
            layers[name.replace(".base_layer", "") + experts] = module
    return layers


def read_adapter(source: str, cache_dir: str | None = None) -> tuple["LoraConfig", dict[str, Tensor]]:
    """Read the configuration and the tensors of the adapter at `source`, a folder or a hub name.

    Other files in the folder, such as those of LLaMA-Factory and ms-swift, are ignored. Raises UserError if `source`
    is not a supported LoRA adapter.
    """
    import peft

    if pathlib.Path(source).is_dir() and not (pathlib.Path(source) / "adapter_config.json").is_file():
        raise UserError(f"{source!r} has no adapter_config.json: give one, such as a run's final/")
    damaged = (OSError, ValueError, RuntimeError, TypeError, KeyError, EOFError, UnpicklingError, SafetensorError)
    try:
        path = cached_file(source, "adapter_config.json", cache_dir=cache_dir)
        _check_settings({"peft_type": None} | json.loads(pathlib.Path(path).read_text(encoding="utf-8")), source)
        with warnings.catch_warnings(action="ignore"):  # warns about settings from other PEFT releases
            config = peft.PeftConfig.from_pretrained(source, cache_dir=cache_dir)
        saved = peft.load_peft_weights(source, device="cpu", cache_dir=cache_dir)
    except damaged as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise UserError(f"cannot read an adapter from {source!r} ({reason})") from None
    # In memory, PEFT's names contain the adapter's name, as in lora_A.default.weight. Some programs save such names.
    name = r"(\.lora_\w+)\.(?!weight$|bias$)\w+|\.modules_to_save\.\w+"
    tensors = {re.sub(name, r"\1", key): tensor for key, tensor in saved.items()}
    if len(tensors) < len(saved):
        raise UserError(f"{source!r} holds several adapters: save the one to use alone")
    return config, tensors


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# The settings in adapter_config.json that `load_adapter` follows, each with a check of its value. Modules and ranks are
# found in the tensors. Any other setting with an effect, in any PEFT release, must be off: it may be a LoRA variant.
SETTINGS: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda kind: kind == "LORA",
    "init_lora_weights": lambda init: str(init).lower() in PLAIN_INITS,
    "bias": lambda bias: bias in ("none", "all", "lora_only"),
    "lora_alpha": _is_finite,
    "lora_dropout": _is_finite,
    "alpha_pattern": lambda alphas: not alphas or (isinstance(alphas, dict) and all(map(_is_finite, alphas.values()))),
    **dict.fromkeys(["use_dora", "use_rslora", "ensure_weight_tying"], lambda value: isinstance(value, bool)),
    **dict.fromkeys(["modules_to_save", "target_parameters"], lambda value: isinstance(value, list | None)),
}
# These say where the adapter comes from and how it was made.
NO_EFFECT = {"auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules"}
NO_EFFECT |= {"fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dtype"}
NO_EFFECT |= {"lora_ga_config", "megatron_core", "peft_version", "rank_pattern", "revision", "runtime_config"}
NO_EFFECT |= {"target_modules", "task_type"}


def _check_settings(settings: dict, source: str) -> None:
    """Raise UserError for the first setting in an adapter_config.json that `load_adapter` does not follow."""
    for name, value in settings.items():
        is_off = value in (None, False, "", [], {}) or _is_finite(value)  # a number alone turns nothing on
        if name not in NO_EFFECT and not (SETTINGS[name](value) if name in SETTINGS else is_off):
            problem = f"its adapter_config.json has {name}={reprlib.repr(value)}, which is not supported"
            raise UserError(f"{source!r}: {problem}: correct it, or merge the adapter with PEFT")


def check_tokens(source: str, base: str, cache_dir: str | None = None) -> None:
    """Raise UserError if a tokenizer was saved with the adapter and has a token that the tokenizer of `base` lacks."""
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if not cached_file(source, "tokenizer_config.json", cache_dir=cache_dir, **missing):
        return
    load = functools.partial(transformers.AutoTokenizer.from_pretrained, trust_remote_code=False, cache_dir=cache_dir)
    try:
        own, known = (load(name).get_vocab() for name in (source, base))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error) or repr(error)).splitlines()[0][:160]
        raise UserError(f"cannot compare the tokenizers of {source} and {base}: {reason}") from None
    if added := sorted((number, token) for token, number in own.items() - known.items()):
        raise UserError(
            f"{source}: its tokenizer has {added[0][1]!r} as token {added[0][0]}, unlike {base}: use a copy of it with "
            f"the adapter's tokenizer files and an embedding of at least {added[-1][0] + 1} tokens, or remove those "
            "files from the adapter if no prompt needs its tokens"
        )


def has_adapter(model: nn.Module) -> bool:
    """Return whether `model` has an adapter."""
    return any(hasattr(module, "lora_A") for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Return whether the forward pass of `model` is random in training mode."""
    return any(isinstance(module, nn.Dropout) and module.p for module in model.modules())


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn off the adapter's dropout inside the context, so that the forward pass of `model` is deterministic."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def reference_weights(model: nn.Module) -> Iterator[None]:
    """Let `model` act as the reference inside the context, if it has an adapter."""
    layers = list(adapted_layers(model).values())
    try:
        for layer in layers:  # PEFT's own methods would also change which parameters are trained
            if REFERENCE in layer.lora_A:
                layer._active_adapter = [REFERENCE]
            else:
                layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [POLICY], False


@torch.no_grad()
def adapted_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base, full tensor) for every parameter of the base, with the adapter added.

    Each tensor has the dtype of the parameter in the base. `round_at_random` rounds adapted ones, always the same way.
    A 4-bit weight is dequantised as in the forward pass. Gathering is collective: each process must iterate to the end.
    """
    layers = adapted_layers(model)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer", "")  # which PEFT adds
        weight = dequantised(parameter) if hasattr(parameter, "quant_state") else distributed.full_tensor(parameter)
        layer = layers.get(name) or layers.get(name.removesuffix(".weight"))
        if layer is not None:
            a, b = (distributed.full_tensor(factor[POLICY].weight) for factor in (layer.lora_A, layer.lora_B))
            adapted = _adapted(weight, a, b, layer.scaling[POLICY])
            weight = round_at_random(adapted, weight.dtype, generator)
        yield name, weight


def _adapted(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + scaling B A in float32.

    For a `weight` (E, O, D) of E experts, PEFT stores `a` as (E r, D), one expert after the other, but `b` as (O, r E),
    with the experts of a column side by side.
    """
    if weight.ndim == 2:
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    experts = len(weight)
    a, b = a.float().unflatten(0, (experts, -1)), b.float().unflatten(1, (-1, experts))
    return torch.baddbmm(weight.float(), b.permute(2, 0, 1), a, alpha=scaling)


def round_at_random(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return the float32 `tensor` in `dtype`, each number rounded up or down at random, so that the mean is exact.

    The weights of a base in bfloat16 lie on its grid. W + δ, rounded to the nearest number of that grid, would be W
    again for each δ of less than half a step, and the sampler would not see the first updates: an update of Gemma 3
    270M at a learning rate of 1e-5 lost 71 % of its effect on the log-probabilities, here only 5 % (docs/log.md).
    """
    dropped = 23 + int(math.log2(torch.finfo(dtype).eps))  # bits of the mantissa that `dtype` lacks: 16 of bfloat16
    if not dropped:
        return tensor.to(dtype)
    noise = torch.randint(2**dropped, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int32)
    return (noise + tensor.view(torch.int32)).bitwise_and_(-(2**dropped)).view(torch.float32).to(dtype)


def dequantised(parameter: Tensor) -> Tensor:
    """Return a bitsandbytes 4-bit weight as the full matrix that the forward pass multiplies by."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the policy's adapter weights, including frozen ones, keyed by the names under which PEFT saves them."""
    adapter = {name: parameter for name, parameter in model.named_parameters() if f".{POLICY}." in name}
    return {f"base_model.model.{name.replace(f'.{POLICY}.', '.')}": parameter for name, parameter in adapter.items()}


def write_adapter(model: nn.Module, base: str, folder: pathlib.Path) -> None:
    """Write the adapter to `folder` in PEFT layout, which PEFT, vLLM and merge_lora.py can load on top of `base`.

    Its `target_modules` are the full names of the adapted layers, because some programs refuse patterns. This is a
    collective: every process must call it. The main process writes.
    """
    tensors = {name: distributed.full_tensor(p.detach()).cpu() for name, p in adapter_parameters(model).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} is not finite: use an earlier checkpoint and a lower --learning_rate")
    if console.is_main():
        config = copy.copy(model.peft_config[POLICY])
        config.base_model_name_or_path, config.inference_mode = base, True
        layers = adapted_layers(model).items()
        config.target_modules = sorted(name for name, layer in layers if not hasattr(layer, "parameter_name"))
        config.save_pretrained(str(folder))
        path = folder / "adapter_model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors would let only the owner read it
        if config.target_parameters:
            console.log(
                f"the adapter has routed experts: load it with transformers {transformers.__version__}, because other "
                "releases may store experts in another layout; a merged model can be loaded with any"
            )
