"""Flags and entries of plugins: what is wrong with one ends in one line, which says where and what to do."""

import dataclasses
import functools
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("parts.plugins", reason="needs parts/plugins.py, which is not here")

import config
import grpo
import rewards
import rollout
from common import cli, distributed, plugins
from common.environments import ENVIRONMENTS, Environment
from common.errors import StepFailed, UserError, check_call
from common.records import Output, Prompt, Request, Rewards
from common.spans import as_tensors
from common.usage import sections_of
from config import Config, EngineFlags, RewardFlags
from data import load_processor
from evaluation.scorer import Scorer
from packing import TokenValues
from parts.plugins import (
    check_entries,
    check_outputs,
    checked_advantage,
    checked_maker,
    checked_objective,
    checked_optimizers,
    checked_order,
    with_flags,
)
from policy.model import load_policy
from policy.optimizer import OPTIMIZERS, make_adamw, make_schedule
from policy.sharding import AFTER_UPDATE
from tests.helpers.runs import SMALL
from tests.helpers.runs import config as small
from tests.helpers.scripts import run_script
from training.prompt_stream import ORDERS


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Keep the tables as they are: checks replace their entries."""
    for table in (grpo.LOSSES, grpo.ADVANTAGES, rollout.ENGINES, ORDERS, OPTIMIZERS, AFTER_UPDATE):
        for name, entry in table.items():
            monkeypatch.setitem(table, name, entry)


# --- how it is called -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda x: 1, "x, cfg", r"it takes \(x\), and is called with \(x, cfg\)"),
        (lambda a, *, c: 1, "a", r"it takes \(a, \*, c\), and is called with \(a\)"),
        (lambda a: 1, "a, c=", r"it takes \(a\), and is called with \(a, c=\)"),
        (None, "a", r"it is None, and is called with \(a\)"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused(function, arguments, message):
    with pytest.raises(UserError, match=f"^--x: {message}$"):
        check_call("--x", function, arguments)


@pytest.mark.parametrize("function", [max, print, lambda *_: 1, lambda a, c=1: 1, SimpleNamespace])
def test_a_function_that_may_take_them_is_taken(function):
    assert check_call("--x", function, "a") if function is not SimpleNamespace else check_call("--x", function, "a=")


def test_a_table_that_was_replaced_is_named(monkeypatch):
    monkeypatch.setattr(grpo, "ADVANTAGES", None)
    with pytest.raises(UserError, match=r"^ADVANTAGES has become a NoneType: add entries to it, and keep it$"):
        check_entries(Config(data="x"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            lambda logp: 1,
            r"^--loss_type own: it takes \(logp\), and is called with \(logp, log_ratio, advantages, batch",
        ),
        (lambda logp, log_ratio, advantages, batch, cfg: 1, r"and is called with \(.*, cfg, entropy=\)$"),
    ],
)
def test_a_loss_with_other_arguments_is_refused_before_a_model_is_loaded(entry, message, monkeypatch):
    monkeypatch.setitem(grpo.LOSSES, "own", grpo.Loss(entry, "tokens", 0.2, 0.2, needs_entropy=True))
    with pytest.raises(UserError, match=message):
        check_entries(Config(data="x", loss_type="own"))


def test_an_advantage_with_other_arguments_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(grpo.ADVANTAGES, "own", lambda rewards: rewards.total)
    with pytest.raises(UserError, match=r"^--advantage own: it takes \(rewards\), and is called with \(rewards, rew"):
        check_entries(Config(data="x", advantage="own"))


@pytest.mark.parametrize("table", ["LOSSES", "ADVANTAGES"])
@pytest.mark.parametrize("entry", [None, 3, "grpo"])
def test_an_entry_that_is_none_is_refused(table, entry, monkeypatch):
    flag, expected = {"LOSSES": ("loss_type", "Loss"), "ADVANTAGES": ("advantage", "Callable")}[table]
    monkeypatch.setitem(getattr(grpo, table), "own", entry)
    with pytest.raises(UserError, match=rf"^--{flag} own: its entry is a {type(entry).__name__}; expected {expected}$"):
        check_entries(Config(data="x", **{flag: "own"}))


def test_a_function_in_place_of_an_environment_is_refused(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "own", lambda text: None)
    with pytest.raises(UserError, match=r"^--env own: its entry is a function; expected Environment$"):
        check_entries(Config(data="x", env="own"))
    check_entries(Config(data="x"))


@pytest.mark.parametrize("bounds", [(-0.1, 0.2), (1.1, 0.2), (float("nan"), 0.2), (0.2, -1), (0.2, float("inf"))])
def test_clip_bounds_that_the_flags_would_not_take_are_refused(bounds):
    with pytest.raises(ValueError, match=r"Loss\s+clip_(low|high)\s+Input should be"):
        grpo.Loss(print, "tokens", clip_low=bounds[0], clip_high=bounds[1])


@pytest.mark.parametrize("table", [ORDERS, OPTIMIZERS, AFTER_UPDATE], ids=["ORDERS", "OPTIMIZERS", "AFTER_UPDATE"])
@pytest.mark.parametrize(
    ("entry", "message"), [(None, "its entry is a NoneType; expected Callable"), (lambda: 1, r"it takes \(\), and is")]
)
def test_an_entry_that_no_flag_chooses_is_checked_before_a_model_is_loaded(table, entry, message, monkeypatch):
    monkeypatch.setitem(table, "default", entry)
    with pytest.raises(UserError, match=rf"^[A-Z_]+\['default'\]: {message}"):
        check_entries(Config(data="x", beta=0.1))


def test_a_missing_order_is_named(monkeypatch):
    monkeypatch.delitem(ORDERS, "default")
    with pytest.raises(UserError, match=r"^ORDERS\['default'\] is missing: replace the entry, and do not delete it$"):
        check_entries(Config(data="x"))


@pytest.mark.parametrize("field", ["format", "exact_match", "answer_group", "gold_problem"])
def test_a_function_of_a_task_with_other_arguments_is_refused_where_it_is_made(field):
    with pytest.raises(UserError, match=rf"^{field}: it takes \(\), and is called with \("):
        rewards.Task(rewards.vqa_reward, **{field: lambda: 1})


def test_a_reward_without_a_name_must_take_all_columns(monkeypatch):
    monkeypatch.setitem(rewards.TASKS, "own", rewards.Task(lambda completion, answer: 1.0))
    with pytest.raises(UserError, match=r"^--task own: reward: it takes \(completion, answer\), and is called with"):
        Scorer("own", RewardFlags())


def test_a_sampler_with_other_arguments_is_refused_where_it_is_made():
    with pytest.raises(UserError, match=r"^make: it takes \(flags\), and is called with \(flags, model, processor"):
        rollout.EngineEntry(lambda flags: None, "own")


# --- what it returns or changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logp", "values"])
def test_an_entry_that_changes_what_it_is_given_is_refused(name):
    """It would be trained on, since the KL term and the metrics are of the same tensors."""
    logp, flag = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    batch = SimpleNamespace(values=TokenValues(logp.clone(), logp.clone(), logp.clone(), flag, flag))

    def objective(logp, values):
        (logp if name == "logp" else values.advantages).add_(1)
        return logp.clone(), flag

    with pytest.raises(
        UserError, match=r"^--loss_type own: it changes a tensor that it is given: let it change a copy"
    ):
        checked_objective("--loss_type own", objective)(logp, batch.values)
    assert checked_objective("--loss_type own", lambda logp, values: (logp * 2, flag))(logp, batch.values)[1] is flag


@pytest.mark.parametrize(
    ("returned", "form"),
    [
        (lambda total: total[:, :1], "float (2, 1)"),
        (lambda total: total.T, "float (4, 2)"),
        (lambda total: torch.zeros(2, 5), "float (2, 5)"),
        (lambda total: torch.zeros(3, 4), "float (3, 4)"),
        (lambda total: total[..., None], "float (2, 4, 1)"),
        (lambda total: total.sum(), "float ()"),
        (lambda total: total.long(), "int64 (2, 4)"),
        (lambda total: total > 0, "bool (2, 4)"),
        (lambda total: total.requires_grad_(), "float (2, 4) with a gradient"),
        (lambda total: total.tolist(), "a list"),
        (lambda total: total.numpy(), "a ndarray"),
        (lambda total: (total, total), "a tuple"),
        (lambda total: (total,), "a tuple"),
        (lambda total: None, "a NoneType"),
    ],
)
def test_an_advantage_of_another_form_is_refused(returned, form):
    """Most of these would be broadcast, or cut, and train on something else."""
    rewards = as_tensors([[Rewards(1.0, 1.0, {"own": 1.0})] * 4] * 2)
    with pytest.raises(StepFailed) as error:
        checked_advantage("--advantage own", lambda rewards: returned(rewards.total.clone()))(rewards)
    assert str(error.value) == f"--advantage own: it returned {form}; expected float (2, 4)"


FAILS = """
import os
import grpo

CALLS = []

def own(rewards, reward_weights, cfg):
    CALLS.append(1)
    if len(CALLS) == 3 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("no variance")
    return grpo.group_advantages(rewards.total)

grpo.ADVANTAGES["own"] = own
"""


def test_a_run_is_saved_if_its_advantage_fails_in_one_process(tiny_model, shapes, tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text(FAILS)
    settings = SMALL | {"max_steps": 4, "model": tiny_model, "data": shapes, "output": tmp_path / "run"}
    flags = [f"--plugin={plugin}", "--advantage=own", *(f"--{key}={value}" for key, value in settings.items())]
    done = run_script("grpo.py", *flags, processes=2)
    assert done.returncode == 1
    assert f"step 3: --plugin {plugin}, line 10: ZeroDivisionError: no variance; " in done.stderr
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert "Traceback" not in done.stderr


NOT_CLIPPED = torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("objective", "form"),
    [
        (lambda logp: (logp[:, None], NOT_CLIPPED), "float (4, 1) with a gradient and bool (4,)"),
        (lambda logp: (logp.sum(), NOT_CLIPPED), "float () with a gradient and bool (4,)"),
        (lambda logp: (logp.detach(), NOT_CLIPPED), "float (4,) and bool (4,)"),
        (lambda logp: (logp, NOT_CLIPPED.long()), "float (4,) with a gradient and int64 (4,)"),
        (lambda logp: (logp, NOT_CLIPPED[:1]), "float (4,) with a gradient and bool (1,)"),
        (lambda logp: (logp, False), "float (4,) with a gradient and a bool"),
        (lambda logp: (NOT_CLIPPED, logp), "bool (4,) and float (4,) with a gradient"),
        (lambda logp: (logp, NOT_CLIPPED, logp), "float (4,) with a gradient and bool (4,) and float (4,) with a grad"),
        (lambda logp: logp, "float (4,) with a gradient"),
        (lambda logp: None, "a NoneType"),
    ],
)
def test_an_objective_of_another_form_is_refused(objective, form):
    """(C, 1) would be broadcast to (C, C), and a number would count once for each token."""
    with pytest.raises(UserError) as error:
        checked_objective("--loss_type own", objective)(torch.zeros(4, requires_grad=True))
    assert str(error.value).startswith(f"--loss_type own: it returned {form}")
    assert str(error.value).endswith("; expected float (4,) with a gradient and bool (4,)")


@pytest.mark.parametrize("row", [-1, 12, 1.0, "3", None, float("nan"), [1]])
def test_an_order_that_names_no_row_is_refused(row):
    """-1 would be the last row."""
    with pytest.raises(UserError, match=r"^ORDERS: it returned .*; expected a row, from 0 to 11$"):
        checked_order(lambda *_: row)(SimpleNamespace(samples=[None] * 12), 0, None)


def test_an_order_may_return_a_number_of_numpy():
    assert type(checked_order(lambda *_: np.int64(3))(SimpleNamespace(samples=[None] * 12), 0, None)) is int


def test_without_a_reference_of_its_own_there_is_nothing_to_change(monkeypatch):
    monkeypatch.setitem(AFTER_UPDATE, "average", lambda policy, reference, updates, cfg: None)
    with pytest.raises(UserError, match=r"^AFTER_UPDATE \(average\) changes the reference: it needs --beta above 0"):
        check_entries(Config(data="x"))
    with pytest.raises(UserError, match=r"with an adapter, that is the model without it; or remove the entry$"):
        check_entries(Config(data="x", beta=0.1, lora_rank=4))


@pytest.mark.parametrize("returned", [7, float("nan"), 0.5, "yes", None, -1])
@pytest.mark.parametrize("name", ["format", "exact_match"])
def test_a_verdict_that_is_none_is_refused(name, returned):
    task = rewards.Task(rewards.vqa_reward, **{name: lambda *_: returned})
    with pytest.raises(UserError, match=rf"^--task: its {name} returned .*; expected True or False, 1 or 0$"):
        task.verdict(name, "1", "1", 1.0)
    assert rewards.Task(rewards.vqa_reward, **{name: lambda *_: torch.ones(()).numpy() > 0}).verdict(name, "1") is True


@pytest.fixture(scope="module")
def processor(tiny_model):
    return load_processor(tiny_model, "count")


SOUND = Output(torch.arange(4), torch.zeros(4), "length")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "a NoneType; expected a list of 2, an Output for each request"),
        ([SOUND], "1 outputs; expected a list of 2"),
        ([SOUND, "1"], "an output of a NoneType, a NoneType; expected"),
        ([SOUND, replace(SOUND, ids=[1, 2])], r"an output of a list, float \(4,\); expected"),
        ([SOUND, replace(SOUND, ids=torch.zeros(4))], r"an output of float \(4,\), float \(4,\)"),
        ([SOUND, replace(SOUND, ids=torch.arange(3))], r"an output of int64 \(3,\), float \(4,\)"),
        ([SOUND, replace(SOUND, reason="eos")], "an output of the reason 'eos'"),
        ([SOUND, replace(SOUND, ids=-torch.arange(4))], r"an output of 4 tokens, tensor\(\[ 0, -1, -2, -3\]\)"),
        ([SOUND, replace(SOUND, ids=torch.full((4,), 10**6))], r"an output of 4 tokens, tensor\(\[1000000"),
        ([SOUND, Output(torch.arange(5), torch.zeros(5))], "an output of 5 tokens, .*; expected an Output of at mos"),
    ],
)
def test_what_a_sampler_returns_is_checked(outputs, message, processor):
    ids = torch.arange(2)
    requests = [Request(Prompt(ids, [0, 1], ids[None]), ids[:0], 0, index, 4) for index in range(2)]
    check_outputs([SOUND] * 2, requests, processor)
    with pytest.raises(UserError, match=f"^the sampler returned {message}"):
        check_outputs(outputs, requests, processor)


def test_a_sampler_that_is_none_and_a_package_of_another_name(monkeypatch, processor, capsys):
    entry = rollout.EngineEntry(lambda *_: None, "mine", "PIL")  # a module of pillow
    monkeypatch.setitem(rollout.ENGINES, "own", entry)
    flags, cpu = EngineFlags(engine="own"), torch.device("cpu")
    assert rollout.choose_engine(flags, cpu) == "own" and capsys.readouterr().err == "sampler: mine\n"
    with pytest.raises(UserError, match=r"^--engine own: it made a NoneType: see `Engine` in rollout.py$"):
        checked_maker("own", entry)(flags, "m", processor, cpu, torch.float32, None, None)
    missing = rollout.EngineEntry(lambda *_: None, "mine", "nowhere.at_all")
    assert missing.lacks(cpu) == ["mine is not installed"]


@pytest.fixture(scope="module")
def adapted(tiny_model, tmp_path_factory):
    """Return a policy, and the flags of its run."""
    cfg = small(tiny_model, "x", tmp_path_factory.mktemp("run"), learning_rate=1e-5)
    return load_policy(tiny_model, cfg, torch.device("cpu")), cfg


def test_a_parameter_in_no_optimizer_is_named(adapted):
    policy, flags = adapted

    def without_norms(policy, flags, updates):
        return make_adamw(policy, flags, updates, [p for p in policy.parameters() if p.ndim > 1 and p.requires_grad])

    def other_schedule(policy, flags, updates):
        ((optimizer, _),) = make_adamw(policy, flags, updates)
        return [(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))]

    with pytest.raises(UserError, match=r"^OPTIMIZERS: model\..*bias is in 0 of them: put each trained parameter in"):
        checked_optimizers(without_norms)(policy, flags, 2)
    with pytest.raises(UserError, match=r"^OPTIMIZERS: expected a list of pairs, .* and its LambdaLR"):
        checked_optimizers(other_schedule)(policy, flags, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[0], "expected a list of pairs"),
        (lambda pairs: None, "expected a list of pairs"),
        (lambda pairs: [pairs[0][0]], "expected a list of pairs"),
        (lambda pairs: [pairs[0][::-1]], "expected a list of pairs"),
        (lambda pairs: [(*pairs[0], 1)], "expected a list of pairs"),
        (lambda pairs: iter(pairs), "expected a list of pairs"),
        (lambda pairs: [], r"model\..* is in 0 of them"),
    ],
)
def test_optimizers_of_another_form_are_refused(change, message, adapted):
    policy, flags = adapted
    with pytest.raises(UserError, match=f"^OPTIMIZERS: {message}"):
        checked_optimizers(lambda *given: change(make_adamw(*given)))(policy, flags, 2)


def test_a_parameter_that_is_not_the_policys_is_refused_before_the_first_step(adapted):
    """No checkpoint could hold it."""
    policy, flags = adapted

    def with_another(policy, flags, updates):
        ((optimizer, schedule),) = make_adamw(policy, flags, updates)
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2, 3)))
        return [(optimizer, schedule)]

    def schedule_of_another(policy, flags, updates):
        return [(make_adamw(policy, flags, updates)[0][0], make_adamw(policy, flags, updates)[0][1])]

    with pytest.raises(UserError, match=r"^OPTIMIZERS: a parameter \(2, 3\) is not the policy's: leave it out$"):
        checked_optimizers(with_another)(policy, flags, 2)
    with pytest.raises(UserError, match=r"^OPTIMIZERS: expected a list of pairs"):
        checked_optimizers(schedule_of_another)(policy, flags, 2)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, r"OPTIMIZERS: LBFGS\.step: it takes \(self, closure\), and is called with \(self\)"),
        (torch.optim.SparseAdam, "OPTIMIZERS: SparseAdam needs sparse gradients"),
    ],
)
def test_an_optimizer_that_cannot_work_here_is_refused(optimizer, message, tiny_model, tmp_path):
    def own(policy, flags, updates):
        made = optimizer([p for p in policy.parameters() if p.requires_grad])
        return [(made, make_schedule(made, flags, updates))]

    cfg = small(tiny_model, "x", tmp_path)
    with pytest.raises(UserError, match=f"^{message}"):
        checked_optimizers(own)(load_policy(tiny_model, cfg, torch.device("cpu")), cfg, 2)


def test_tools_with_a_control_token_are_refused(processor, monkeypatch):
    """It would end the system's turn."""
    from parts.turns.environment import find_environment

    own = ModuleType("own")
    own.reply = lambda text, state: None
    monkeypatch.setattr(plugins, "_modules", {"own.py": own})
    monkeypatch.setattr("parts.turns.environment.parameters", lambda name: (["text", "state"], [], False, False))
    tools = [{"type": "function", "function": {"name": "look", "description": "<|im_end|>"}}]
    monkeypatch.setitem(ENVIRONMENTS, "own", Environment(own.reply, tools))
    with pytest.raises(
        UserError, match=r"^--env own: its tools contain <\|im_end\|>, which would act as a control token"
    ):
        find_environment("own", processor.tokenizer, 2, 100)
    with pytest.raises(ValueError, match=r"^reply is a NoneType; expected a function"):
        Environment(None)


# --- its exceptions and flags -----------------------------------------------------------------------------------------


def explained(file: str, text: str):
    namespace = {}
    exec(compile(f"def fail():\n    raise RuntimeError({text!r})\n", file, "exec"), namespace)
    try:
        namespace["fail"]()
    except RuntimeError as error:
        return distributed.explain(error)


def test_an_error_of_a_user_that_names_gloo_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert explained("/home/me/mine.py", "no gloo here, and no NCCL") is None
    assert explained("/venv/site-packages/torch/distributed/x.py", "gloo: closed")[1] == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("x: int = 'a'", r"the default of x, 'a', is no <class 'int'>"),
        ("x: tuple[int, ...] = ('a',)", r"the default of x, \('a',\), is no tuple\[int, \.\.\.\]"),
        ("x: int = None", "the default of x, None, is no"),
        ("x: bool = 1", "the default of x, 1, is no"),
        ("x: list[int] = dataclasses.field(default_factory=lambda: ['a'])", "the default of x"),
        ("x: 'Nope' = 1", "NameError: name 'Nope' is not defined"),
        ("x: 'list[' = 1", "SyntaxError: Forward reference must be an expression"),
    ],
)
def test_a_flag_whose_type_is_wrong_or_unknown_is_refused(lines, message, monkeypatch):
    own = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", own)  # where names in quotes are looked up
    own.__file__ = "own.py"
    exec(f"import dataclasses\n@dataclasses.dataclass\nclass Flags:\n    {lines}\n", vars(own))
    with pytest.raises(UserError, match=f"^--plugin own.py: {message}"):
        with_flags(config.Config, own)


def test_a_flag_that_fails_prints_no_control_characters():
    own = ModuleType("own")
    own.__file__ = "own.py"
    body = "x: float = 1\n    def __post_init__(self): raise ValueError('\\x1b[31m')\n"
    exec(f"import dataclasses\n@dataclasses.dataclass\nclass Flags:\n    {body}", vars(own))
    with pytest.raises(ValueError, match=r"^\\x1b\[31m$"):
        with_flags(config.Config, own)(data="x")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("pathlib.Path", "pathlib.Path('x')"),
        ("Colour", "Colour.RED"),
        ("bytes", "b'x'"),
        ("set[int]", "dataclasses.field(default_factory=set)"),
        ("dict[str, int]", "dataclasses.field(default_factory=dict)"),
        ("torch.dtype", "torch.float32"),
        ("typing.Any", "object()"),
        ("tuple[pathlib.Path, ...]", "(pathlib.Path('x'),)"),
    ],
)
def test_a_flag_that_config_json_cannot_hold_is_refused(kind, value, capsys):
    imports = "import dataclasses, enum, pathlib, torch, typing\nclass Colour(str, enum.Enum):\n    RED = 'red'\n"
    own = ModuleType("own")
    own.__file__ = "own.py"
    exec(f"{imports}@dataclasses.dataclass\nclass Flags:\n    x: {kind} = {value}\n", vars(own))
    with pytest.raises(SystemExit) as stopped:
        cli.parse(with_flags(config.Config, own), ["--data=x"])
    assert stopped.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search(r"x is a \w+: make it a number, a text or a tuple of these", printed), printed


def test_flags_of_plain_types_are_taken(monkeypatch):
    own, none = ModuleType("own"), ModuleType("none")
    types = "    a: int = 1\n    b: str | None = None\n    c: tuple[float, ...] = (1.0, 2.0)\n    d: bool = False\n"
    exec(f"import dataclasses\n@dataclasses.dataclass\nclass Flags:\n{types}", vars(own))
    own.__file__, none.__file__, none.Flags = "own.py", "none.py", None
    flags = with_flags(with_flags(config.Config, own), none)
    assert cli.parse(flags, ["--data=x", "--c", "3", "4", "--d"]).c == (3.0, 4.0)
    monkeypatch.setattr(plugins, "_modules", {"own.py": own, "none.py": none})
    assert plugins.record()["plugin_flags"] == ["a", "b", "c", "d"]


def test_the_flags_of_plugins_have_a_section_of_the_help():
    more = dataclasses.make_dataclass("More", [("depth", int, 1)])
    flags = dataclasses.make_dataclass("Flags", [("size", int, 1)])
    config = functools.reduce(
        with_flags, (SimpleNamespace(__file__="x.py", Flags=own) for own in (more, flags)), Config
    )
    sections = {title: [field.name for field in dataclasses.fields(each)] for title, each in sections_of(config)}
    assert sections["plugin"] == ["size", "depth"]
    assert list(sections) == ["common", "plugin", "grpo", "row", "data", "policy", "engine", "run", "parts"]
