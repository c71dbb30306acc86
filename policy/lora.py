"""LoRA (arXiv:2106.09685): a few trained parameters beside a frozen base.

    adapted weight = W + scaling B A        W (O, D) frozen, A (r, D) and B (O, r) trained
    scaling        = α / r, with rslora (arXiv:2312.03732) α / √r

The sampler gets the adapted weights, made anew from the base for every sync: nothing is ever merged into the base, so
no rounding adds up. The reference of the KL term is the same model with its adapter switched: to the one it started
from, or, where it started from none, off. There is no second copy of the base.
"""

import contextlib
import copy
import pathlib
import re
import warnings
from collections.abc import Iterator
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from common import distributed
from common.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig


POLICY, REFERENCE = "policy", "reference"  # adapters: the trained one, and the one it started from
LANGUAGE_TARGETS = r"model\.(language_model\.)?layers\.\d+\.\w+\.(q|k|v|o|gate|up|down)_proj"
VISION_TARGETS = (
    r"model\.visual\.blocks\.\d+\.\w+\.(qkv|proj|gate_proj|up_proj|down_proj|fc1|fc2|linear_fc1|linear_fc2)"
)
INITS = ("true", "false", "gaussian", "orthogonal", "eva", "mica")  # of A and B alone
CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga")  # of the base too, which PEFT makes plain LoRA of
UNSUPPORTED = ("trainable_token_indices", "lora_bias", "target_parameters", "layer_replication", "use_qalora")
UNSUPPORTED += ("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config")
UNSUPPORTED += ("monteclora_config",)
MERGE_FIRST = "merge it into its base with merge_lora.py and train a new adapter with --lora_rank"


def load_peft() -> ModuleType:
    """PEFT, imported where there is an adapter and not before: it takes two seconds."""
    import peft

    return peft


def new_adapter(model: nn.Module, rank: int, alpha: float, vision: bool) -> None:
    """Put an adapter that changes nothing yet beside every linear layer of the decoder stack, and of the vision tower
    with `vision`; the rest of `model` is frozen. The same random A on every process."""
    targets = f"{LANGUAGE_TARGETS}|{VISION_TARGETS}" if vision else LANGUAGE_TARGETS
    if not any(re.fullmatch(targets, name) for name, _ in model.named_modules()):
        raise UserError(
            f"--lora_rank: {type(model).__name__} has no layers named as those of Qwen's and Llama's decoder stacks, "
            "beside which an adapter is put: train it whole, without --lora_rank"
        )
    alpha = alpha or 2 * rank
    config = load_peft().LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _inject(config, model, [POLICY])


def continue_adapter(model: nn.Module, source: str) -> None:
    """Put the adapter saved at `source` beside the layers it was made for, to be trained on, and once more as it is,
    for the reference.

    Raises UserError when there is none, when it was made for another base or when it holds more than A and B.
    """
    saved, tensors = read_adapter(source)
    if saved.use_dora or saved.modules_to_save or saved.bias != "none":
        what = "DoRA" if saved.use_dora else "modules_to_save" if saved.modules_to_save else "trained biases"
        raise UserError(f"--adapter {source}: {what} cannot be continued: {MERGE_FIRST}")
    found = match_modules(tensors, model, source)
    for (module, part), tensor in found.items():
        if part not in ("lora_A.weight", "lora_B.weight") or tensor.ndim != 2:
            what = part if tensor.ndim == 2 else f"a {part} of {tensor.ndim} dimensions"
            raise UserError(f"--adapter {source}: {module} has {what}, which cannot be continued: {MERGE_FIRST}")
    config, before = modernise_config(saved, tensors, model), list(dict(model.named_modules()))
    written = copy.copy(config)  # what the result is written with
    written.target_modules, written.exclude_modules, written.layers_to_transform, written.layers_pattern = _selection(
        saved, set(config.target_modules), before
    )
    config.lora_dropout = 0.0  # the sampler has none
    _inject(config, model, [POLICY, REFERENCE])
    modules = dict(model.named_modules())
    for (module, part), tensor in found.items():
        for name in (POLICY, REFERENCE):
            getattr(modules[module], part.removesuffix(".weight"))[name].weight.data.copy_(tensor)
    model.peft_config[POLICY] = written


def modernise_config(config: "LoraConfig", tensors: dict[str, Tensor], model: nn.Module) -> "LoraConfig":
    """A copy of `config` that names every adapted module in full as `model` does, with its rank and α, which the saved
    patterns give by the names of `tensors`; loading it leaves the base as it is."""
    patterns, ranks, alphas = load_peft().utils.other.get_pattern_key, {}, {}
    modules = dict(model.named_modules())
    for key, tensor in tensors.items():
        path = _strip_prefix(key)
        module, part = resolve_module(path, modules)
        if part in ("lora_A.weight", "lora_embedding_A"):
            ranks[module] = len(tensor)
            own = patterns(config.alpha_pattern.keys(), path.removesuffix(f".{part}"))
            alphas[module] = config.alpha_pattern.get(own, config.lora_alpha)
    config = copy.copy(config)
    config.target_modules = sorted(ranks)
    config.rank_pattern = {module: rank for module, rank in ranks.items() if rank != config.r}
    config.alpha_pattern = {module: alpha for module, alpha in alphas.items() if alpha != config.lora_alpha}
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.init_lora_weights = True
    return config


def _selection(config: "LoraConfig", targets: set[str], modules: list[str]) -> tuple:
    """What makes PEFT adapt `targets` and no other of `modules`: what `config` says, where it holds with today's names,
    else the last parts of their names, else all of them. (target_modules, exclude_modules, layers_to_transform,
    layers_pattern)."""
    last = sorted({target.rpartition(".")[2] for target in targets})
    as_saved = (config.target_modules, config.exclude_modules, config.layers_to_transform, config.layers_pattern)
    matches = load_peft().tuners.tuners_utils.check_target_module_exists
    for selection in (as_saved, (last, None, None, None)):
        trial = copy.copy(config)
        trial.target_modules, trial.exclude_modules, trial.layers_to_transform, trial.layers_pattern = selection
        if {name for name in modules if matches(trial, name)} == targets:
            return selection
    return sorted(targets), None, None, None


def _inject(config: "LoraConfig", model: nn.Module, names: list[str]) -> None:
    """Put adapters into `model`, of which POLICY is active and alone trained."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # there are meant to be two
        for name in names:
            load_peft().inject_adapter_in_model(copy.copy(config), model, name)
    for layer in adapted_layers(model).values():
        layer._active_adapter = [POLICY]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{POLICY}." in name)
        if ".lora_" in name:
            parameter.data = parameter.data.float()  # master weights


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers with an adapter, by their names in `model`."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def read_adapter(source: str, cache_dir: str | None = None) -> tuple["LoraConfig", dict[str, Tensor]]:
    """The configuration and the tensors of the adapter in the folder or under the hub name `source`; other files, as
    LLaMA-Factory and ms-swift leave there, are not looked at. Raises UserError when it is not a LoRA adapter."""
    if pathlib.Path(source).is_dir() and not (pathlib.Path(source) / "adapter_config.json").is_file():
        raise UserError(f"{source!r} has no adapter_config.json: an adapter in PEFT layout is needed")
    peft = load_peft()
    try:
        with warnings.catch_warnings(action="ignore"):  # of settings that another release of PEFT wrote
            config = peft.PeftConfig.from_pretrained(source, cache_dir=cache_dir)
        tensors = peft.load_peft_weights(source, device="cpu", cache_dir=cache_dir)
    except (
        OSError,
        ValueError,
        RuntimeError,
        TypeError,
        KeyError,
        EOFError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise UserError(f"cannot read an adapter from {source!r} ({reason})") from None
    if not isinstance(config, peft.LoraConfig):
        raise UserError(f"{source!r} holds a {config.peft_type} adapter; LoRA is what is supported here")
    _refuse_unsupported(config, source)
    return config, tensors


def _refuse_unsupported(config: "LoraConfig", source: str) -> None:
    """Raise UserError for kinds of LoRA whose A and B alone do not say what the adapted weights are."""
    init = str(config.init_lora_weights).lower()
    if init.startswith(CONVERTIBLE):
        raise UserError(
            f"{source!r} was initialised with {init!r}, which rewrote the base: have PEFT save it as plain LoRA, with "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    kind = next((name for name in UNSUPPORTED if getattr(config, name, None)), None)
    if kind is None and init not in INITS:
        kind = f"init_lora_weights={init!r}"
    if kind:
        raise UserError(f"{source!r} is a LoRA adapter with {kind}, which is not supported: merge it with PEFT itself")


def _strip_prefix(key: str) -> str:
    """What an adapter's tensor `key` belongs to, as the model it was made for called it."""
    return key.removeprefix("base_model.model.").replace(".base_layer.", ".")


def match_modules(tensors: dict[str, Tensor], model: nn.Module, source: str) -> dict[tuple[str, str], Tensor]:
    """`tensors` by (module of `model`, what of it: «lora_A.weight», …), names of older transformers brought up to date.

    Raises UserError naming the first module that `model` lacks or that has other shapes.
    """
    modules, found = dict(model.named_modules()), {}
    for key, tensor in tensors.items():
        path = _strip_prefix(key)
        module, part = resolve_module(path, modules)
        if module is None:
            raise UserError(f"{source} was made for another base: this one has no module for its {path}")
        wanted = _shape(modules[module], part)
        if wanted is not None and not _fits(tensor.shape, wanted):
            raise UserError(
                f"{source} was made for another base: its {path} is {tuple(tensor.shape)}, which does not fit the "
                f"{tuple(modules[module].weight.shape)} of {module} here"
            )
        found[module, part] = tensor
    return found


def resolve_module(path: str, modules: dict[str, nn.Module]) -> tuple[str | None, str]:
    """The longest start of `path`, or of what older releases of transformers call it, that is one of `modules`; and the
    rest, «weight», «lora_A.weight», …; (None, path) when there is none."""
    for old, new in (("", ""), ("model.", "model.language_model."), ("visual.", "model.visual.")):
        name, part = new + path.removeprefix(old) if path.startswith(old) else path, ""
        while "." in name:
            name, _, last = name.rpartition(".")
            part = f"{last}.{part}" if part else last
            if name in modules and (part.startswith("lora_") or part in ("weight", "bias")):
                return name, part
    return None, path


def _shape(module: nn.Module, part: str) -> tuple[int | None, ...] | None:
    """The shape that `part` must have beside `module`, None where any number may stand."""
    weight = getattr(module, "weight", None)
    shape = getattr(getattr(weight, "quant_state", None), "shape", getattr(weight, "shape", None))
    if shape is None or len(shape) != 2:
        return None
    outputs, inputs = shape
    wanted = {"lora_A.weight": (None, inputs), "lora_B.weight": (outputs, None), "weight": (outputs, inputs)}
    wanted |= {"lora_embedding_A": (None, outputs), "lora_embedding_B": (inputs, None)}
    return wanted.get(part)


def _fits(shape: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, got) for got, want in zip(shape, wanted))


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is trained beside `model`."""
    return bool(adapted_layers(model))


@contextlib.contextmanager
def reference_weights(model: nn.Module, switch: bool = True) -> Iterator[None]:
    """Inside, `model` is its own reference: with the adapter it started from, or without one."""
    layers = list(adapted_layers(model).values()) if switch else []
    try:
        for layer in layers:  # PEFT's own switches would change what is trained too
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
    """(name in the base, whole tensor) of every parameter with the adapter in it, in the base's dtype, a 4-bit one
    dequantised as its forward does. Every process must go through all of it together."""
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if ".lora_" in name:
            continue
        weight = dequantised(parameter) if hasattr(parameter, "quant_state") else distributed.full_tensor(parameter)
        layer = layers.get(owner.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            a, b = (distributed.full_tensor(part[POLICY].weight) for part in (layer.lora_A, layer.lora_B))
            weight = torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[POLICY]).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def dequantised(parameter: Tensor) -> Tensor:
    """The whole of a bitsandbytes 4-bit weight, as its forward multiplies with it."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The policy's adapter by the names PEFT saves it under, what of it is frozen included."""
    found = {name: parameter for name, parameter in model.named_parameters() if f".{POLICY}." in name}
    return {f"base_model.model.{name.replace(f'.{POLICY}.', '.')}": parameter for name, parameter in found.items()}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The policy's adapter as PEFT names it, on the CPU; every process calls it together."""
    return {name: distributed.full_tensor(p.detach()).cpu() for name, p in adapter_parameters(model).items()}


def write_adapter(model: nn.Module, tensors: dict[str, Tensor], base: str, folder: pathlib.Path) -> None:
    """adapter_config.json and adapter_model.safetensors, which PEFT, vLLM and merge_lora.py load over `base`."""
    config = copy.copy(model.peft_config[POLICY])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
