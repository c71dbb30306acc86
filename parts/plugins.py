"""Commands with plugins (docs/plugins.md): their flags, and checks of the entries that they add to tables.

`launch_with` is all that the core asks for. An entry that a command uses is replaced by a function that also checks
what it returns, and that it changes no tensor that it is given. Without a plugin, nothing is checked.
"""

import dataclasses
import functools
import importlib
import re
import reprlib
import sys
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from types import ModuleType
from typing import Any

import pydantic
import torch
from torch.optim.lr_scheduler import LambdaLR

from common import cli, console, distributed, plugins
from common.errors import StepFailed, UserError, check_call, require

# module, table, class of its entries in the same module ("": functions), the flag that chooses one ("": all are used)
TABLES = (
    ("rewards", "TASKS", "Task", "task"),
    ("grpo", "LOSSES", "Loss", "loss_type"),
    ("grpo", "ADVANTAGES", "", "advantage"),
    ("rollout", "ENGINES", "EngineEntry", "engine"),
    ("common.environments", "ENVIRONMENTS", "Environment", "env"),
    ("training.prompt_stream", "ORDERS", "", ""),
    ("policy.optimizer", "OPTIMIZERS", "", ""),
    ("policy.sharding", "AFTER_UPDATE", "", ""),
)
# not free for flags: `--help`, and other names in config.json
TAKEN = ("help", "total_steps", "world_size", "command", "git_commit", "plugin_sha256", "plugin_flags")


def launch_with(
    modules: list[ModuleType],
    name: str,
    config: type,
    add_defaults: Callable[[list[str]], list[str]],
    arguments: list[str],
) -> None:
    """Call `main` of the module `name` with flags of `config` and of the plugins `modules`, once these are checked."""
    try:
        cfg: Any = cli.parse(functools.reduce(with_flags, modules, config), add_defaults(arguments))
    except (AssertionError, AttributeError, NameError, TypeError) as error:  # because of Flags
        raise plugins.mistake(modules[-1].__file__, error) from None
    cfg.plugin = tuple(module.__file__ for module in modules)
    main = importlib.import_module(name).main
    check_entries(cfg)
    try:
        main(cfg)
    except SystemExit as error:  # it would end an unfinished run with status 0
        raise RuntimeError("a function of a plugin or a reward has called exit()") from error


# --- flags ------------------------------------------------------------------------------------------------------------


def with_flags(config: type, plugin: ModuleType) -> type:
    """Return the dataclass `config` with the flags of `plugin`. Raises UserError if one of them exists already."""
    flags, where = getattr(plugin, "Flags", None), f"--plugin {plugin.__file__}"
    if flags is None:
        return config
    is_one = isinstance(flags, type) and dataclasses.is_dataclass(flags)
    if not is_one or flags.__dataclass_params__.frozen:
        raise UserError(f"{where}: Flags is no dataclass, or is frozen: write @dataclasses.dataclass above the class")
    known = {*dir(config), *(field.name for field in dataclasses.fields(config)), *TAKEN}
    names = [*(field.name for field in dataclasses.fields(flags)), *(name for name in vars(flags) if name[:2] != "__")]
    if taken := [name for name in names if name in known]:
        raise UserError(f"{where}: the flag {taken[0]} exists already: choose another name")
    try:
        hints = typing.get_type_hints(flags)
    except Exception as error:  # noqa: BLE001 - a hint in quotes may raise anything
        raise plugins.mistake(plugin.__file__, error) from None
    for field in dataclasses.fields(flags):
        field.kw_only = True  # else, flags without a default could not follow those of `config`
        _check_flag(where, field, hints[field.name])

    @dataclasses.dataclass
    class Config(config, flags):  # type: ignore[valid-type, misc]
        __doc__ = config.__doc__

        def __post_init__(self) -> None:
            super().__post_init__()
            try:
                getattr(flags, "__post_init__", lambda _: None)(self)
            except ValueError as error:
                raise ValueError(console.printable(str(error))) from None
            for field in dataclasses.fields(flags):
                kind = type(value := getattr(self, field.name, None)).__name__
                require(_is_plain(value), f"{field.name} is a {kind}: make it a number, a text or a tuple of these")

    return Config


def _check_flag(where: str, field: dataclasses.Field, hint: Any) -> None:
    """Raise UserError if a field of `Flags` cannot be a flag, or has a default that is not of its type."""
    if not field.init:
        raise UserError(f"{where}: {field.name} has init=False, so that it is no flag: make it a constant of the file")
    own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if own is dataclasses.MISSING:
        return
    try:
        pydantic.TypeAdapter(hint).validate_python(own, strict=True)
    except pydantic.ValidationError:
        raise UserError(f"{where}: the default of {field.name}, {own!r:.40}, is no {hint!s:.80}") from None
    except pydantic.PydanticUserError:  # pydantic does not know the type; `_is_plain` checks the value
        pass


def _is_plain(value: Any) -> bool:
    """Return whether config.json can hold `value`, and `./run.sh eval` can pass it on."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, str, bool)


# --- entries ----------------------------------------------------------------------------------------------------------


def check_entries(cfg: Any) -> None:
    """Raise UserError for entries that cannot be used, and add checks of what those that `cfg` uses return."""
    for module, name, kind, flag in TABLES:
        if home := sys.modules.get(module):
            chosen = getattr(cfg, flag, None) if flag else None
            _check_table(getattr(home, name), name, getattr(home, kind) if kind else Callable, flag, chosen)
    if "grpo" in sys.modules and hasattr(cfg, "loss_type"):  # not in `data.py show`, which has the flags alone
        _check_algorithm(cfg)
    if rollout := sys.modules.get("rollout"):
        for name, entry in rollout.ENGINES.items():  # all: a plugin may also change the class of a sampler
            rollout.ENGINES[name] = replace(entry, make=checked_maker(name, entry))


def _check_table(table: Any, name: str, kind: Any, flag: str, chosen: str | None) -> None:
    if not isinstance(table, dict):
        raise UserError(f"{name} has become a {type(table).__name__}: add entries to it, and keep it")
    for key, entry in table.items():
        if (not flag or key == chosen) and not isinstance(entry, kind):
            where = f"--{flag} {key}" if flag else f"{name}[{key!r}]"
            raise UserError(f"{where}: its entry is a {type(entry).__name__}; expected {kind.__name__}")
    if name in ("ORDERS", "OPTIMIZERS") and "default" not in table:
        raise UserError(f"{name}['default'] is missing: replace the entry, and do not delete it")


def _check_algorithm(cfg: Any) -> None:
    """Check the entries that a training run with the flags `cfg` uses, and add checks of what they return."""
    from policy.optimizer import OPTIMIZERS
    from policy.sharding import AFTER_UPDATE
    from training.prompt_stream import ORDERS

    grpo = sys.modules["grpo"]
    loss, advantage = grpo.LOSSES.get(cfg.loss_type), grpo.ADVANTAGES.get(getattr(cfg, "advantage", ""))
    if loss and loss.objective.__module__ != "grpo":
        where = f"--loss_type {cfg.loss_type}"
        entropy = ", entropy=" * loss.needs_entropy
        check_call(where, loss.objective, f"logp, log_ratio, advantages, batch, cfg{entropy}")
        grpo.LOSSES[cfg.loss_type] = replace(loss, objective=checked_objective(where, loss.objective))
    if advantage and advantage.__module__ != "grpo":
        where = f"--advantage {cfg.advantage}"
        check_call(where, advantage, "rewards, reward_weights, cfg")
        grpo.ADVANTAGES[cfg.advantage] = checked_advantage(where, advantage)
    order, make = ORDERS["default"], OPTIMIZERS["default"]
    ORDERS["default"] = checked_order(check_call("ORDERS['default']", order, "stream, position, cfg"))
    OPTIMIZERS["default"] = checked_optimizers(check_call("OPTIMIZERS['default']", make, "policy, flags, updates"))
    for name, change in AFTER_UPDATE.items():
        check_call(f"AFTER_UPDATE[{name!r}]", change, "policy, reference, updates, cfg")
    if AFTER_UPDATE and (cfg.has_adapter or not cfg.beta):
        why = "it needs --beta above 0" if not cfg.has_adapter else "with an adapter, that is the model without it"
        raise UserError(f"AFTER_UPDATE ({', '.join(AFTER_UPDATE)}) changes the reference: {why}; or remove the entry")


def checked_objective(where: str, objective: Callable) -> Callable:
    """Return an objective that checks what it returns: one number, and one bool, for each token."""

    def checked(logp: Any, *given: Any, **options: Any) -> Any:
        expected = [form(logp), f"bool {tuple(logp.shape)}"]
        return _checked(where, objective, (logp, *given), expected, **options)

    return checked


def checked_advantage(where: str, advantage: Callable) -> Callable:
    """Return an advantage that checks what it returns: a number for each completion.

    If it fails in any process, all raise StepFailed, which saves the run before it ends.
    """

    def checked(rewards: Any, *given: Any) -> Any:
        with distributed.shared_errors(StepFailed):
            try:
                return _checked(where, advantage, (rewards, *given), [form(rewards.total)])
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                raise plugins.mistake(sys.modules[advantage.__module__].__file__, error) from None

    return checked


def _checked(where: str, function: Callable, given: Sequence[Any], expected: list[str], **options: Any) -> Any:
    """Call an entry, and return what it returns: one tensor, or a tuple of several, whose forms are `expected`.

    Raises UserError if a `form` differs, or if it changes a tensor that it is given.
    """
    before, returned = _versions((*given, *options.values())), function(*given, **options)
    tensors = returned if isinstance(returned, tuple) and len(expected) > 1 else (returned,)
    got = [form(each) for each in tensors]
    if got != expected:
        raise UserError(f"{where}: it returned {' and '.join(got)}; expected {' and '.join(expected)}")
    if before != _versions((*given, *options.values())):
        raise UserError(f"{where}: it changes a tensor that it is given: let it change a copy, x.clone()")
    return returned


def _versions(values: Sequence[Any]) -> list[Any]:
    """Return how often each tensor in `values`, or in a dataclass among them, was changed in place."""
    own = [each for each in values if dataclasses.is_dataclass(each)]
    inner = [_versions([getattr(each, field.name) for field in dataclasses.fields(each)]) for each in own]
    return [inner, *(getattr(each, "_version", None) for each in values)]


def form(tensor: Any) -> str:
    """Return the kind of number and the shape of a tensor, in words."""
    if not hasattr(tensor, "requires_grad"):
        return f"a {type(tensor).__name__}"
    kind = re.sub(r"torch\.(b?float\d+)?", "", str(tensor.dtype)) or "float"
    return f"{kind} {tuple(tensor.shape)}" + " with a gradient" * tensor.requires_grad


def checked_order(order: Callable) -> Callable:
    """Return an order of rows that checks what it returns: the index of a row."""

    def checked(stream: Any, position: int, cfg: Any) -> int:
        row, last = order(stream, position, cfg), len(stream.samples) - 1
        if not (isinstance(row, Integral) and 0 <= row <= last):  # type: ignore[operator]
            raise UserError(f"ORDERS: it returned {reprlib.repr(row)}; expected a row, from 0 to {last}")
        return int(row)

    return checked


def checked_optimizers(make: Callable) -> Callable:
    """Return `make`, with checks of the optimizers that it returns.

    Each trained parameter, and nothing else, must be in exactly one. A schedule must be a LambdaLR, which checkpoints
    restore.
    """

    def checked(policy: torch.nn.Module, flags: Any, updates: int) -> list[tuple]:
        made = make(policy, flags, updates)
        are_pairs = isinstance(made, list) and all(isinstance(each, tuple) and len(each) == 2 for each in made)
        if not (are_pairs and all(isinstance(s, LambdaLR) and s.optimizer is optimizer for optimizer, s in made)):
            raise UserError("OPTIMIZERS: expected a list of pairs, of an optimizer and its LambdaLR: use make_schedule")
        for optimizer, _ in made:
            check_call(f"OPTIMIZERS: {type(optimizer).__name__}.step", type(optimizer).step, "self")
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise UserError("OPTIMIZERS: SparseAdam needs sparse gradients, which a model lacks: use another")
        counts = Counter(p for optimizer, _ in made for group in optimizer.param_groups for p in group["params"])
        for name, p in policy.named_parameters():
            if counts[p] != p.requires_grad:
                how = "put each trained parameter in exactly one"
                raise UserError(f"OPTIMIZERS: {name} is in {counts[p]} of them: {how}")
        if others := counts.keys() - set(policy.parameters()):
            shape = tuple(others.pop().shape)
            raise UserError(f"OPTIMIZERS: a parameter {shape} is not the policy's: leave it out")
        return made

    return checked


def checked_maker(name: str, entry: Any) -> Callable:
    """Return what makes the sampler of `entry`, with checks of the outputs that its `generate` returns."""
    from rollout import Engine

    def checked(flags: Any, model: str, processor: Any, *others: Any) -> Any:
        engine = entry.make(flags, model, processor, *others)
        if not isinstance(engine, Engine):
            raise UserError(f"--engine {name}: it made a {type(engine).__name__}: see `Engine` in rollout.py")
        arguments = "requests, sampling" + ", then=" * entry.then + ", should_stop=" * entry.should_stop
        generate = check_call(f"--engine {name}: generate", engine.generate, arguments)

        def checked_generate(requests: Sequence, sampling: Any, **options: Any) -> Any:
            outputs = generate(requests, sampling, **options)
            check_outputs(outputs, requests, processor)
            return outputs

        engine.generate = checked_generate  # type: ignore[assignment, method-assign]
        return engine

    return checked


def check_outputs(outputs: Any, requests: Sequence, processor: Any) -> None:
    """Raise UserError unless `outputs` are what a sampler was asked for."""
    vocabulary, number = processor.skeleton.get_input_embeddings().weight.shape[0], len(requests)
    if not (isinstance(outputs, list) and len(outputs) == number):
        found = f"{len(outputs)} outputs" if isinstance(outputs, list) else f"a {type(outputs).__name__}"
        raise UserError(f"the sampler returned {found}; expected a list of {number}, an Output for each request")
    for output, request in zip(outputs, requests):
        if fault := _fault(output, request.max_tokens, vocabulary):
            expected = f"an Output of at most {request.max_tokens} tokens from 0 to {vocabulary - 1}"
            raise UserError(f"the sampler returned an output of {fault}; expected {expected}")


def _fault(output: Any, longest: int, vocabulary: int) -> str:
    """Describe an output that cannot be used; return "" for one that can."""
    found = ", ".join(form(getattr(output, name, None)) for name in ("ids", "logp"))
    if not re.fullmatch(r"int64 (\(\d+,\)), float \1", found):
        return found
    if (reason := getattr(output, "reason", "")) not in ("stop", "length", None):
        return f"the reason {reprlib.repr(reason)}"
    is_inside = len(output.ids) <= longest and bool(((output.ids >= 0) & (output.ids < vocabulary)).all())
    return "" if is_inside else f"{len(output.ids)} tokens, {str(output.ids)[:60]}"
