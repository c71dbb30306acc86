"""Entries that a plugin adds to tables: what is wrong with one ends in one line, which says where and what to do."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import config
import grpo
import rewards
import rollout
from common import distributed, plugins
from common.environments import ENVIRONMENTS, Environment
from common.errors import UserError, call_entry, check_call, find_entry
from common.records import Rollout, Sampling
from config import Config, EngineFlags, RewardFlags
from data import load_processor
from evaluation.scorer import Scorer
from inputs.environment import find_environment
from packing import TokenValues
from policy.model import load_policy
from policy.optimizer import OPTIMIZERS, make_optimizers, make_schedule
from policy.sharding import AFTER_UPDATE
from tests.helpers.runs import config as small
from training import run
from training.prompt_stream import ORDERS

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


def test_a_table_that_was_replaced_is_named():
    with pytest.raises(UserError, match=r"^--advantage own: its table has become a NoneType: add entries to it"):
        find_entry("advantage", "own", None, object)


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
        grpo.resolve_loss(Config(data="x", loss_type="own"))


def test_an_advantage_with_other_arguments_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(grpo.ADVANTAGES, "own", lambda rewards: rewards.total)
    with pytest.raises(UserError, match=r"^--advantage own: it takes \(rewards\), and is called with \(rewards, rew"):
        grpo.resolve_loss(Config(data="x", advantage="own"))


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
        run.check_entries()


def test_a_missing_order_is_named(monkeypatch):
    monkeypatch.delitem(ORDERS, "default")
    with pytest.raises(UserError, match=r"^ORDERS\['default'\]: add one with --plugin FILE$"):
        run.check_entries()


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
        return logp.clone()

    with pytest.raises(
        UserError, match=r"^--loss_type own: it changes a tensor that it is given: let it change a copy"
    ):
        call_entry("--loss_type own", objective, (logp, batch.values), logp)
    assert call_entry("--loss_type own", lambda logp, values: logp * 2, (logp, batch.values), logp).shape == (3,)


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


SOUND = Rollout(torch.arange(4), torch.zeros(4), text="1")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            None,
            r"groups of \[1\], a completion of a NoneType, a NoneType, a NoneType; expected 2 groups of 2 completions",
        ),
        (
            [[SOUND] * 2],
            r"groups of \[2\]; expected 2 groups of 2 completions, of at most 4 tokens from 0 to \d+, each",
        ),
        ([[SOUND] * 2, [SOUND]], r"groups of \[2, 1\]; expected"),
        ([[SOUND] * 2, [SOUND, "1"]], r"a completion of a NoneType, a NoneType, a NoneType; expected"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, ids=[1, 2])]], r"of a list, float \(4,\), a str; expected"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, ids=torch.zeros(4))]], r"of float \(4,\), float \(4,\), a str"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, ids=torch.arange(3))]], r"of int64 \(3,\), float \(4,\), a str"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, text=None)]], r"of int64 \(4,\), float \(4,\), a NoneType"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, ids=-torch.arange(4))]], r"of 4 tokens, tensor\(\[ 0, -1, -2, -3\]\)"),
        ([[SOUND] * 2, [SOUND, replace(SOUND, ids=torch.full((4,), 10**6))]], r"of 4 tokens, tensor\(\[1000000"),
        ([[SOUND] * 2, [Rollout(torch.arange(5), torch.zeros(5))] * 2], r"of 5 tokens, tensor\(\[0, 1"),
    ],
)
def test_what_a_sampler_returns_is_checked(groups, message, processor):
    sampling = Sampling(2, 4)
    assert rollout.check_rollouts([[SOUND] * 2] * 2, 2, sampling, processor) == [[SOUND] * 2] * 2
    with pytest.raises(UserError, match=f"^the sampler returned .*{message}"):
        rollout.check_rollouts(groups, 2, sampling, processor)


def test_a_sampler_that_is_none_and_a_package_of_another_name(monkeypatch, processor, capsys):
    entry = rollout.EngineEntry(lambda *_: None, "mine", "PIL")  # a module of pillow
    monkeypatch.setitem(rollout.ENGINES, "own", entry)
    flags, cpu = EngineFlags(engine="own"), torch.device("cpu")
    assert rollout.choose_engine(flags, cpu) == "own" and capsys.readouterr().err == "sampler: mine\n"
    with pytest.raises(UserError, match=r"^--engine own: it made a NoneType: see `Engine` in rollout.py$"):
        rollout.make_engine(flags, "m", processor, cpu, torch.float32, None)
    missing = rollout.EngineEntry(lambda *_: None, "mine", "nowhere.at_all")
    assert missing.lacks(cpu) == ["mine is not installed"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, r"OPTIMIZERS: LBFGS\.step: it takes \(self, closure\), and is called with \(self\)"),
        (torch.optim.SparseAdam, "OPTIMIZERS: SparseAdam needs sparse gradients"),
    ],
)
def test_an_optimizer_that_cannot_work_here_is_refused(optimizer, message, tiny_model, tmp_path, monkeypatch):
    def own(policy, flags, updates):
        made = optimizer([p for p in policy.parameters() if p.requires_grad])
        return [(made, make_schedule(made, flags, updates))]

    monkeypatch.setitem(OPTIMIZERS, "default", own)
    cfg = small(tiny_model, "x", tmp_path)
    with pytest.raises(UserError, match=f"^{message}"):
        make_optimizers(load_policy(tiny_model, cfg, torch.device("cpu")), cfg, 2)


def test_tools_with_a_control_token_are_refused(processor, monkeypatch):
    """It would end the system's turn."""
    own = ModuleType("own")
    own.reply = lambda text, state: None
    monkeypatch.setattr(plugins, "_modules", {"own.py": own})
    monkeypatch.setattr("inputs.environment.parameters", lambda name: (["text", "state"], [], False))
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
        plugins.with_flags(config.Config, own)


def test_a_flag_that_fails_prints_no_control_characters():
    own = ModuleType("own")
    own.__file__ = "own.py"
    body = "x: float = 1\n    def __post_init__(self): raise ValueError('\\x1b[31m')\n"
    exec(f"import dataclasses\n@dataclasses.dataclass\nclass Flags:\n    {body}", vars(own))
    with pytest.raises(ValueError, match=r"^\\x1b\[31m$"):
        plugins.with_flags(config.Config, own)(data="x")
