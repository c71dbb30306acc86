"""LoRA adapters (arXiv:2106.09685): a few trained parameters on top of a frozen base model.

    adapted weight = W + scaling B A        W (O, D) frozen, A (r, D) and B (O, r) trained
    scaling        = α / r, with rslora (arXiv:2312.03732) α / √r

The sampler receives adapted weights, which are recomputed from the base for every sync. Nothing is ever merged into the
base, so rounding errors do not accumulate. The reference of the KL term is the same model with a different adapter: the
adapter that training started from, or none if training started with a new adapter. There is no second copy of the base.
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


POLICY, REFERENCE = "policy", "reference"  # names of the trained adapter and of the adapter it started from
LANGUAGE_TARGETS = r"model\.(language_model\.)?layers\.\d+\.\w+\.(q|k|v|o|gate|up|down)_proj"
VISION_TARGETS = (
    r"model\.visual\.blocks\.\d+\.\w+\.(qkv|proj|gate_proj|up_proj|down_proj|fc1|fc2|linear_fc1|linear_fc2)"
)
PLAIN_INITS = ("true", "false", "gaussian", "orthogonal", "eva", "mica")  # these initialise only A and B
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga")  # these also change the base; PEFT can convert them
UNSUPPORTED = ("trainable_token_indices", "lora_bias", "target_parameters", "layer_replication", "use_qalora")
UNSUPPORTED += ("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config")
UNSUPPORTED += ("monteclora_config",)
MERGE_FIRST = "merge it into its base with merge_lora.py and train a new adapter with --lora_rank"


def load_peft() -> ModuleType:
    """Import and return PEFT. The import takes two seconds, so it is deferred until it is needed."""
    import peft

    return peft


def new_adapter(model: nn.Module, rank: int, alpha: float, vision: bool) -> None:
    """Add a new adapter to every linear layer of the decoder stack and freeze the rest of `model`.

    `vision`: also adapt the linear layers of the vision tower. The adapter has no effect at first, because `B` is zero;
    `A` is random but the same on every process. Raises UserError if `model` has no such layers.
    """
    targets = f"{LANGUAGE_TARGETS}|{VISION_TARGETS}" if vision else LANGUAGE_TARGETS
    if not any(re.fullmatch(targets, name) for name, _ in model.named_modules()):
        raise UserError(
            f"--lora_rank: {type(model).__name__} has no layers with the names that Qwen and Llama use, so there is "
            "nothing to adapt: train the whole model, without --lora_rank"
        )
    alpha = alpha or 2 * rank
    config = load_peft().LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _inject(config, model, [POLICY])


def continue_adapter(model: nn.Module, source: str) -> None:
    """Load the adapter saved at `source` into `model` twice: once to continue training, once frozen as the reference.

    Raises UserError if there is no adapter, if the adapter was made for a different base, or if it contains anything
    other than A and B.
    """
    saved, tensors = read_adapter(source)
    if saved.use_dora or saved.modules_to_save or saved.bias != "none":
        what = "DoRA" if saved.use_dora else "modules_to_save" if saved.modules_to_save else "trained biases"
        raise UserError(f"--adapter {source}: {what} cannot be continued: {MERGE_FIRST}")
    matched = match_modules(tensors, model, source)
    for (module, param), tensor in matched.items():
        if param not in ("lora_A.weight", "lora_B.weight") or tensor.ndim != 2:
            what = param if tensor.ndim == 2 else f"a {param} of {tensor.ndim} dimensions"
            raise UserError(f"--adapter {source}: {module} has {what}, which cannot be continued: {MERGE_FIRST}")
    config, module_names = modernise_config(saved, tensors, model), list(dict(model.named_modules()))
    export = copy.copy(config)  # settings that are saved with the trained adapter
    export.target_modules, export.exclude_modules, export.layers_to_transform, export.layers_pattern = (
        _target_selection(saved, set(config.target_modules), module_names)
    )
    config.lora_dropout = 0.0  # the sampler has no dropout
    _inject(config, model, [POLICY, REFERENCE])
    modules = dict(model.named_modules())
    for (module, param), tensor in matched.items():
        for name in (POLICY, REFERENCE):
            getattr(modules[module], param.removesuffix(".weight"))[name].weight.data.copy_(tensor)
    model.peft_config[POLICY] = export


def modernise_config(config: "LoraConfig", tensors: dict[str, Tensor], model: nn.Module) -> "LoraConfig":
    """Return a copy of `config` that lists every adapted module by its full name in `model`, with its rank and α.

    The saved patterns refer to the module names in `tensors`, which may be from an older release. Loading an adapter
    with this copy does not change the base.
    """
    matching_pattern, ranks, alphas = load_peft().utils.other.get_pattern_key, {}, {}
    modules = dict(model.named_modules())
    for key, tensor in tensors.items():
        path = _strip_prefix(key)
        module, param = resolve_module(path, modules)
        if param in ("lora_A.weight", "lora_embedding_A"):
            ranks[module] = len(tensor)
            pattern = matching_pattern(config.alpha_pattern.keys(), path.removesuffix(f".{param}"))
            alphas[module] = config.alpha_pattern.get(pattern, config.lora_alpha)
    config = copy.copy(config)
    config.target_modules = sorted(ranks)
    config.rank_pattern = {module: rank for module, rank in ranks.items() if rank != config.r}
    config.alpha_pattern = {module: alpha for module, alpha in alphas.items() if alpha != config.lora_alpha}
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.init_lora_weights = True
    return config


def _target_selection(config: "LoraConfig", targets: set[str], modules: list[str]) -> tuple:
    """Return the settings that make PEFT adapt exactly `targets` among `modules`.

    Returns (target_modules, exclude_modules, layers_to_transform, layers_pattern). The settings of `config` are tried
    first, then the last components of the targets' names. If neither works, the full names are returned.
    """
    last_names = sorted({target.rpartition(".")[2] for target in targets})
    as_saved = (config.target_modules, config.exclude_modules, config.layers_to_transform, config.layers_pattern)
    matches = load_peft().tuners.tuners_utils.check_target_module_exists
    for selection in (as_saved, (last_names, None, None, None)):
        trial = copy.copy(config)
        trial.target_modules, trial.exclude_modules, trial.layers_to_transform, trial.layers_pattern = selection
        if {name for name in modules if matches(trial, name)} == targets:
            return selection
    return sorted(targets), None, None, None


def _inject(config: "LoraConfig", model: nn.Module, names: list[str]) -> None:
    """Add adapters called `names` to `model`. Only `POLICY` is active and trained."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two adapters are intended
        for name in names:
            load_peft().inject_adapter_in_model(copy.copy(config), model, name)
    for layer in adapted_layers(model).values():
        layer._active_adapter = [POLICY]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{POLICY}." in name)
        if ".lora_" in name:
            parameter.data = parameter.data.float()  # master weights


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's adapted layers, keyed by their names in `model`."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def read_adapter(source: str, cache_dir: str | None = None) -> tuple["LoraConfig", dict[str, Tensor]]:
    """Read the configuration and the tensors of the adapter at `source`, a folder or a hub name.

    Other files in the folder, such as those of LLaMA-Factory and ms-swift, are ignored. Raises UserError if `source`
    is not a supported LoRA adapter.
    """
    if pathlib.Path(source).is_dir() and not (pathlib.Path(source) / "adapter_config.json").is_file():
        raise UserError(f"{source!r} has no adapter_config.json: give an adapter in PEFT layout")
    peft = load_peft()
    try:
        with warnings.catch_warnings(action="ignore"):  # about settings from a different PEFT release
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
        raise UserError(f"{source!r} holds a {config.peft_type} adapter; only LoRA is supported")
    _refuse_unsupported(config, source)
    return config, tensors


def _refuse_unsupported(config: "LoraConfig", source: str) -> None:
    """Raise UserError for kinds of LoRA whose adapted weights depend on more than A and B."""
    init = str(config.init_lora_weights).lower()
    if init.startswith(BASE_CHANGING_INITS):
        raise UserError(
            f"{source!r} was initialised with {init!r}, which changed the base: convert it to plain LoRA with PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    kind = next((name for name in UNSUPPORTED if getattr(config, name, None)), None)
    if kind is None and init not in PLAIN_INITS:
        kind = f"init_lora_weights={init!r}"
    if kind:
        raise UserError(f"{source!r} is a LoRA adapter with {kind}, which is not supported: merge it with PEFT itself")


def _strip_prefix(key: str) -> str:
    """Return the path of an adapter's tensor `key` in the adapter's own base model, without PEFT's additions."""
    return key.removeprefix("base_model.model.").replace(".base_layer.", ".")


def match_modules(tensors: dict[str, Tensor], model: nn.Module, source: str) -> dict[tuple[str, str], Tensor]:
    """Return `tensors`, keyed by a module name in `model` and a parameter name such as "lora_A.weight".

    Names from older transformers releases are translated. Raises UserError for the first tensor whose module does not
    exist in `model` or whose shape does not fit.
    """
    modules, matched = dict(model.named_modules()), {}
    for key, tensor in tensors.items():
        path = _strip_prefix(key)
        module, param = resolve_module(path, modules)
        if module is None:
            raise UserError(f"{source} was made for another base: this base has no module for {path}")
        expected = _expected_shape(modules[module], param)
        if expected is not None and not _shape_matches(tensor.shape, expected):
            raise UserError(
                f"{source} was made for another base: {path} has shape {tuple(tensor.shape)}, which does not fit the "
                f"weight {tuple(modules[module].weight.shape)} of {module} in this base"
            )
        matched[module, param] = tensor
    return matched


def resolve_module(path: str, modules: dict[str, nn.Module]) -> tuple[str | None, str]:
    """Split `path` into the name of one of `modules` and a parameter name such as "weight" or "lora_A.weight".

    The longest matching module name wins. Paths from older transformers releases are translated. Returns (None, path)
    if no module matches.
    """
    for old, new in (("", ""), ("model.", "model.language_model."), ("visual.", "model.visual.")):
        name, param = new + path.removeprefix(old) if path.startswith(old) else path, ""
        while "." in name:
            name, _, last = name.rpartition(".")
            param = f"{last}.{param}" if param else last
            if name in modules and (param.startswith("lora_") or param in ("weight", "bias")):
                return name, param
    return None, path


def _expected_shape(module: nn.Module, param: str) -> tuple[int | None, ...] | None:
    """Return the shape that `param` must have for `module`, or None if any shape is accepted.

    A None inside the shape stands for any size.
    """
    weight = getattr(module, "weight", None)
    shape = getattr(getattr(weight, "quant_state", None), "shape", getattr(weight, "shape", None))
    if shape is None or len(shape) != 2:
        return None
    outputs, inputs = shape
    shapes = {"lora_A.weight": (None, inputs), "lora_B.weight": (outputs, None), "weight": (outputs, inputs)}
    shapes |= {"lora_embedding_A": (None, outputs), "lora_embedding_B": (inputs, None)}
    return shapes.get(param)


def _shape_matches(shape: torch.Size, expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(want in (None, got) for got, want in zip(shape, expected))


def has_adapter(model: nn.Module) -> bool:
    """Return whether `model` has an adapter."""
    return bool(adapted_layers(model))


@contextlib.contextmanager
def reference_weights(model: nn.Module, switch: bool = True) -> Iterator[None]:
    """Inside the context, let `model` act as the reference, with the adapter that training started from or with none.

    Does nothing if `switch` is false or the model has no adapter.
    """
    layers = list(adapted_layers(model).values()) if switch else []
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

    Each tensor has the dtype of the parameter in the base. A 4-bit weight is dequantised as in the forward pass.
    Gathering is collective: every process must iterate to the end.
    """
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if ".lora_" in name:
            continue
        weight = dequantised(parameter) if hasattr(parameter, "quant_state") else distributed.full_tensor(parameter)
        layer = layers.get(owner.removesuffix(".base_layer"))
        if layer is not None and leaf == "weight":
            a, b = (distributed.full_tensor(factor[POLICY].weight) for factor in (layer.lora_A, layer.lora_B))
            weight = torch.addmm(weight.float(), b.float(), a.float(), alpha=layer.scaling[POLICY]).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def dequantised(parameter: Tensor) -> Tensor:
    """Return a bitsandbytes 4-bit weight as the full matrix that the forward pass multiplies by."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the policy's adapter weights, including frozen ones, keyed by the names under which PEFT saves them."""
    adapter = {name: parameter for name, parameter in model.named_parameters() if f".{POLICY}." in name}
    return {f"base_model.model.{name.replace(f'.{POLICY}.', '.')}": parameter for name, parameter in adapter.items()}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the policy's full adapter tensors on the CPU, keyed by PEFT's names.

    This is a collective: every process must call it.
    """
    return {name: distributed.full_tensor(p.detach()).cpu() for name, p in adapter_parameters(model).items()}


def write_adapter(model: nn.Module, tensors: dict[str, Tensor], base: str, folder: pathlib.Path) -> None:
    """Write the adapter to `folder` in PEFT layout, which PEFT, vLLM and merge_lora.py can load on top of `base`."""
    config = copy.copy(model.peft_config[POLICY])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
