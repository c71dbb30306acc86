"""Partial rollouts: completions that are interrupted and go on in a later step.

Guards against: tokens or log-probabilities that do not fit the policy that sampled them, prompts that are never trained
on or twice, tokens that are too old, and processes or resumed runs that continue differently.
"""

import copy
import itertools
import json
import pathlib
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

pytest.importorskip("parts.partial", reason="needs parts/partial.py, which is not here")

import grpo
import training.run
from common.errors import RunStopped, StepFailed, UserError
from common.records import Rewards, Rollout, Sampling, ScoredGroup
from config import Config, PolicyFlags
from data import encode_prompt, load_processor
from packing import pack
from parts.partial import PartialCollector, StoppingRule, least_length, partial_metrics, with_num_stale
from policy.model import load_model, load_policy
from rollout import ENGINES, NOT_STARTED, EngineEntry
from sampling.hf_engine import HFEngine
from tests.helpers.models import plain_logprobs
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL, config, metrics, weights
from tests.helpers.samplers import groups_of
from tests.helpers.scripts import run_script
from training.prompt_stream import DrawnPrompt

PARTIAL = {"oversample": 2.0, "max_completion_length": 96}


# --- which prompts are trained on ------------------------------------------------------------------------------------


def test_the_oldest_whole_prompts_are_chosen_and_the_rest_can_wait():
    choose = StoppingRule(step=5, num_prompts=2, num_generations=4, max_staleness=2).choose
    assert choose([4, 5, 5, 5], [False, True, False, False]) is None, "only one is complete"
    assert choose([4, 5, 5, 5], [False, True, False, True]) == [1, 3]
    assert choose([4, 5, 5, 5], [True, True, False, True]) == [0, 1]
    assert choose([3, 5, 5, 5], [False, True, True, True]) is None, "the first must be trained on in this step"
    assert choose([3, 5, 5, 5], [True, False, True, True]) == [0, 2]
    assert choose([4, 4, 4, 5, 5], [False, False, False, True, True]) is None, "three are due within one step"
    assert choose([4, 4, 4, 5, 5], [False, True, False, True, True]) == [1, 3]
    assert choose([5] * 7, [True] * 2 + [False] * 5) is None, "five are due within two steps"
    assert choose([1, 1, 1], [True, True, True]) == [0, 1], "nothing is left to wait for"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(oversample=0.5), "oversample must be from 1 to max_staleness"),
        (dict(oversample=3.5), "oversample must be from 1 to max_staleness"),
        (dict(max_staleness=0), "max_staleness must be from 1 to 100"),
        (dict(max_staleness=101), "max_staleness must be from 1 to 100"),
        (dict(oversample=2.0, tensor_parallel=2), "oversample needs tensor_parallel 1"),
        (dict(oversample=2.0, importance_cap=0.0), "oversample needs an importance weight"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        Config(data="rows", **flags)


def sampled(lengths_by_step: dict[int, int], extra: int = 0, finished: bool = True) -> Rollout:
    """Return a completion of which so many tokens were sampled in each step, and `extra` in none."""
    length = sum(lengths_by_step.values()) + extra
    return Rollout(torch.zeros(length).long(), torch.zeros(length), finished=finished, tokens_by_step=lengths_by_step)


def test_ages_are_counted_in_steps():
    """By hand, in step 7: 20 tokens of this step, 10 of the last, 5 and 1 of earlier ones, and 4 without a record."""
    rollouts = [sampled({6: 10, 7: 12}), sampled({3: 1, 5: 5, 7: 8}), sampled({}, extra=4)]
    waiting = DrawnPrompt(0, 6, 0, (rollouts[0],))
    unfinished = DrawnPrompt(1, 6, 1, (rollouts[0], sampled({6: 3}, finished=False)))
    got = partial_metrics(rollouts, [waiting, unfinished, unfinished], step=7, max_staleness=2)
    shares = {f"partial/tokens_of_age_{age}": pytest.approx(tokens / 40) for age, tokens in enumerate((24, 10, 6))}
    assert got == shares | {"partial/groups_waiting": 1, "partial/groups_unfinished": 2}


def test_what_is_in_flight_has_to_fit_into_the_length_limit():
    """Without room for a token, sampling would never end. A finished completion's advantages fill the limit only."""
    unfinished, shorter, finished = sampled({0: 9}, finished=False), sampled({0: 3}, finished=False), sampled({0: 10})
    in_flight = [DrawnPrompt(3, 1, 5, (finished, unfinished, shorter))]
    cfg, stream = Config(data="x", max_steps=1), SimpleNamespace(lengths={}, rewarded={})
    one, two = (PartialCollector(cfg, stream, None, None, None, []) for _ in range(2))
    one.in_flight = in_flight
    two.load_state_dict(one.state_dict())
    (restored,) = two.in_flight
    assert (restored.position, restored.step, restored.row, restored.is_complete) == (3, 1, 5, False)
    assert [rollout.tokens_by_step for rollout in restored.rollouts] == [{0: 10}, {0: 9}, {0: 3}]
    assert least_length(one.state_dict()["in_flight"]) == 10
    one.in_flight = [DrawnPrompt(3, 1, 5, (unfinished, shorter))]
    assert least_length(one.state_dict()["in_flight"]) == 10
    one.in_flight = [DrawnPrompt(3, 1, 5, (shorter,))]
    assert least_length(one.state_dict()["in_flight"]) == 4 and least_length([]) == 0


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model) -> HFEngine:
    return HFEngine(load_model(tiny_model, torch.float32).eval(), load_processor(tiny_model, "count").tokenizer)


@pytest.fixture(scope="module")
def prompts(tiny_model):
    processor = load_processor(tiny_model, "count")
    images = [Image.new("RGB", size, (90, 20, 200)) for size in ((84, 84), (56, 112), (84, 56))]
    samples = [
        make_sample("<image>How many?", "1", images[:1], "a"),
        make_sample("no image here", "1", [], "b"),
        make_sample("<image>and<image> which?", "1", images[1:], "c"),
    ]
    return [encode_prompt(sample, processor) for sample in samples]


def pauses(count: int):
    """Return a function that says "enough" when it is asked for the `count`-th time."""
    asked = []
    return lambda whole: asked.append(whole) or len(asked) == count


def test_interrupted_completions_go_on_where_they_stopped(engine, prompts):
    """With the same weights, sampling with interruptions gives what sampling at once does."""
    how, seeds = Sampling(4, 70), [1, 2, 3]
    want = groups_of(engine, prompts, seeds, how)
    got = [[NOT_STARTED] * 4] * 3
    lengths = set()
    for tokens in (16, 32, 64):
        got = groups_of(engine, prompts, seeds, how, None, got, pauses(2 if tokens < 64 else 3))
        lengths |= {len(rollout.ids) for group in got for rollout in group if not rollout.finished}
    assert lengths == {16, 32, 64}
    got = groups_of(engine, prompts, seeds, how, None, got)
    for a, b in zip((r for group in want for r in group), (r for group in got for r in group)):
        assert torch.equal(a.ids, b.ids)
        assert (a.text, a.truncated, b.finished) == (b.text, b.truncated, True)
        torch.testing.assert_close(a.sampling_logp, b.sampling_logp, atol=2e-5, rtol=0)


def test_the_gradient_of_a_completion_of_two_policies(tiny_model, shapes, engine, prompts, tmp_path):
    """It is Σ_t w · min(π_θ / π_t, 2) · A · ∇ log π_θ, where π_t is the policy that sampled the token t."""
    how = Sampling(2, 40)
    old = copy.deepcopy(engine)
    for parameter in old.model.parameters():
        parameter.data *= 1.1
    started = groups_of(old, prompts[:1], [1], how, should_stop=pauses(2))
    assert {len(rollout.ids) for rollout in started[0]} == {16}
    (rollouts,) = groups_of(engine, prompts[:1], [1], how, None, started)
    rollouts = [
        replace(rollout, tokens_by_step={0: 16} | ({1: len(rollout.ids) - 16} if len(rollout.ids) > 16 else {}))
        for rollout in rollouts
    ]
    rollouts = [with_num_stale(rollout, step=1) for rollout in rollouts]
    policy = load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))
    cfg = config(tiny_model, shapes, tmp_path, oversample=1.5)
    grpo.resolve_loss(cfg)
    sample = make_sample("How many?", "1", [], "a")
    scored = ScoredGroup(sample, prompts[0], rollouts, [Rewards(1.0, 1.0), Rewards(0.0, 0.0)], 0)
    groups = grpo.training_groups(cfg, [scored], torch.tensor([[1.5, -0.5]]))
    assert [completion.num_stale for completion in groups[0].completions] == [16, 16]
    batch = pack(groups)
    logp, _ = policy(batch)
    loss, stats = grpo.batch_loss(cfg, batch, logp)
    loss.backward()

    plain = copy.deepcopy(engine.model).float()
    by_hand, capped, differences = 0.0, 0, []
    for rollout, advantage in zip(rollouts, (1.5, -0.5)):
        new = plain_logprobs(plain, groups[0], rollout.ids)
        ratio = (new.detach() - rollout.sampling_logp).exp()
        capped += (ratio >= 2).sum().item()
        differences.append((new.detach() - rollout.sampling_logp).abs()[16:])
        by_hand = by_hand - (ratio.clamp(max=2) * advantage * new).sum() / (2 * len(rollout.ids))
    by_hand.backward()
    assert stats["importance_capped"] == capped > 0
    assert stats["fresh_tokens"] == sum(map(len, differences))
    assert stats["difference"].item() == pytest.approx(torch.cat(differences).sum().item(), abs=1e-4)
    for (name, p), q in zip(plain.named_parameters(), policy.model.parameters()):
        if q.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=2e-6, rtol=2e-4, msg=name)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch) -> list[list[str]]:
    """The rows that each step was trained on."""
    training_groups, steps = grpo.training_groups, []

    def recorded(cfg, groups, advantages):
        steps.append([group.sample.source for group in groups])
        if cfg.oversample > 1:
            assert all(sum(r.tokens_by_step.values()) == len(r.ids) for group in groups for r in group.rollouts)
        return training_groups(cfg, groups, advantages)

    monkeypatch.setattr(grpo, "training_groups", recorded)
    return steps


def test_every_prompt_is_trained_on_once_and_in_time(brief_model, shapes, tmp_path, trained):
    """Two epochs of 12 rows in steps of 4 prompts, with 8 in flight."""
    grpo.main(config(brief_model, shapes, tmp_path, epochs=2, save_every=1, keep_last=0, **PARTIAL))
    rows = metrics(tmp_path)
    counts = Counter(itertools.chain.from_iterable(trained))
    assert len(rows) == len(trained) == 6
    assert set(counts.values()) == {2} and len(counts) == 12
    assert rows[0]["partial/tokens_of_age_0"] == 1
    assert any(row["partial/tokens_of_age_1"] for row in rows)
    assert any(row["partial/groups_unfinished"] for row in rows)
    for row in rows:
        assert sum(row[f"partial/tokens_of_age_{age}"] for age in range(3)) == pytest.approx(1)
        assert row["sampling/logp_difference_mean"] < 1e-5
        in_flight = row["partial/groups_waiting"] + row["partial/groups_unfinished"]
        assert in_flight == (4 if row["step"] < 6 else 0)
        assert (tmp_path / f"checkpoint-{row['step']}" / "in_flight.pt").is_file() == bool(in_flight)


def saved_progress(run: pathlib.Path, step: int) -> dict:
    """Return what the checkpoint of `step` says about the run's progress, and which prompts it has in flight."""
    folder = run / f"checkpoint-{step}"
    state = json.loads((folder / "state.json").read_text())
    in_flight = torch.load(folder / "in_flight.pt") if (folder / "in_flight.pt").is_file() else []
    progress = {name: state[name] for name in ("step", "eval_due", "collector", "updater")}
    return progress | {"in_flight": [(each["position"], each["step"]) for each in in_flight]}


def test_a_resumed_run_goes_on_with_its_unfinished_completions(brief_model, shapes, tmp_path, monkeypatch):
    """From a checkpoint, and after a step that failed in the middle.

    The failed step must be undone before the run is saved. Otherwise, its prompts would be lost or drawn twice.
    """
    flags = dict(max_steps=4, save_every=2, beta=0.01, **PARTIAL)
    grpo.main(config(brief_model, shapes, tmp_path / "run", **flags))
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    grpo.main(config(brief_model, shapes, tmp_path / "resumed", resume="newest", **flags))
    advantages, calls = grpo.group_advantages, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 3:
            raise StepFailed("on purpose")
        return advantages(*args)

    monkeypatch.setattr(grpo, "group_advantages", fail_once)
    flags["save_every"] = 0  # if there already were a checkpoint of step 2, the undone step would not be saved
    with pytest.raises(RunStopped, match="on purpose"):
        grpo.main(config(brief_model, shapes, tmp_path / "failed", **flags))
    assert saved_progress(tmp_path / "failed", 2) == saved_progress(tmp_path / "run", 2)
    grpo.main(config(brief_model, shapes, tmp_path / "failed", resume="newest", **flags))
    whole = weights(tmp_path / "run" / "final")
    for name in ("resumed", "failed"):
        other = weights(tmp_path / name / "final")
        assert all(torch.equal(whole[key], other[key]) for key in whole), name
        assert saved_progress(tmp_path / name, 4) == saved_progress(tmp_path / "run", 4), name
    assert metrics(tmp_path / "run") == metrics(tmp_path / "failed")
    assert any(row["partial/groups_unfinished"] for row in metrics(tmp_path / "run"))


def test_what_is_in_flight_is_trained_on_without_the_flag_too(brief_model, shapes, tmp_path, trained, monkeypatch):
    flags = dict(save_every=1, max_completion_length=96, keep_last=0, max_steps=3)
    grpo.main(config(brief_model, shapes, tmp_path / "first", oversample=2.0, **flags))
    flags["resume"] = str(tmp_path / "first" / "checkpoint-1")
    del trained[1:]
    grpo.main(config(brief_model, shapes, tmp_path / "second", **flags))
    counts = Counter(itertools.chain.from_iterable(trained))
    assert len(trained) == 3 and set(counts.values()) == {1} and len(counts) == 12
    assert metrics(tmp_path / "second")[0]["partial/tokens_of_age_1"] > 0
    third = tmp_path / "third"
    with pytest.raises(UserError, match=r"prompts in flight need --max_completion_length \d+ or more, until a run"):
        grpo.main(config(brief_model, shapes, third, **flags | {"max_completion_length": 16}))
    with pytest.raises(UserError, match="prompts in flight need an importance weight"):
        grpo.main(config(brief_model, shapes, third, importance_cap=0.0, **flags))
    with pytest.raises(UserError, match="need --max_staleness 2 or more, until a run with --oversample 1 has trained"):
        grpo.main(config(brief_model, shapes, third, max_staleness=1, **flags))
    with pytest.raises(UserError, match=r"need --max_pixels as it was \(\d+\), until a run with --oversample 1"):
        grpo.main(config(brief_model, shapes, third, max_pixels=6000, **flags))
    cfg = config(brief_model, shapes, third, **flags)
    cfg.tensor_parallel = 2
    monkeypatch.setattr(training.run, "check_engine_available", lambda *_: None)
    with pytest.raises(UserError, match="prompts in flight need --tensor_parallel 1, until"):
        grpo.main(cfg)
    monkeypatch.setitem(ENGINES, "own", EngineEntry(make=ENGINES["hf"].make, title="mine"))
    with pytest.raises(UserError, match="need another sampler than --engine own, which does not know `should_stop`"):
        grpo.main(config(brief_model, shapes, third, engine="own", **flags))


def test_a_sampler_that_cannot_be_stopped_is_refused(brief_model, shapes, tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "own", EngineEntry(make=ENGINES["hf"].make, title="mine"))
    with pytest.raises(UserError, match="--engine own does not know `should_stop`: leave --oversample out"):
        grpo.main(config(brief_model, shapes, tmp_path, engine="own", **PARTIAL))


def test_prompts_in_flight_of_another_form_are_refused_in_one_line(tmp_path):
    state = {"config": {}, "collector": {"in_flight": [{"rollouts": [{}]}]}}
    with pytest.raises(UserError, match=r"^\S+ cannot be loaded into this run \(KeyError: 'finished'\): use the flags"):
        training.run.collector_of(Config(data="x"), state, tmp_path)


def test_dynamic_sampling_draws_from_what_is_in_flight(brief_model, shapes, tmp_path, trained, capsys):
    flags = dict(dynamic_sampling_rounds=3, max_steps=3)
    grpo.main(config(brief_model, shapes, tmp_path, **flags, **PARTIAL))
    rows = metrics(tmp_path)
    assert len(rows) == 3
    assert all(row["groups_drawn"] in (4, 8, 12) for row in rows)
    left = sum(rows[-1][f"partial/groups_{name}"] for name in ("waiting", "unfinished"))
    assert left and f"prompts drawn and not trained on: {left:g};" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_deal_out_what_is_in_flight(brief_model, shapes, tmp_path):
    flags = [f"--{name}={value}" for name, value in (SMALL | PARTIAL).items()]
    flags += [f"--model={brief_model}", f"--data={shapes}", "--learning_rate=1e-3", "--max_steps=4"]
    for processes in (0, 2):
        done = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
    for a, b in zip(metrics(tmp_path / "0"), metrics(tmp_path / "2")):
        for name in ("reward", "completions/mean_length", "loss", "grad_norm", "partial/tokens_of_age_1"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (a["step"], name)
