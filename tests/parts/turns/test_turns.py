"""Episodes of several turns: what the samplers return, what is trained on, and whole runs with `--env`.

Guards against: observed tokens that count as sampled, log-probabilities or positions that differ between sampler and
trainer, and runs that depend on the number of processes or on when they were killed.
"""

import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")

import data
import evaluate
import grpo
import rewards
from common.environments import Environment
from common.errors import UserError
from common.files import read_jsonl
from common.parts import extra
from common.records import Completion, Group, Prompt, Rewards, Rollout, Sampling, ScoredGroup, Span, Trajectory
from config import Config, PolicyFlags
from data import encode_prompt, load_processor
from evaluation.scorer import Scorer
from packing import pack
from parts.turns import use_environment
from parts.turns.episodes import Episodes
from parts.turns.metrics import difference_by_turn, turn_metrics
from policy.families import find_family
from policy.model import load_model, load_policy
from sampling.hf_engine import HFEngine, PolicyEngine
from tests.helpers.marks import needs, slow
from tests.helpers.models import FAMILIES, TEXT, TOKENS, WITH_IMAGES, save_tiny
from tests.helpers.rows import make_sample
from tests.helpers.runs import config, difference, metrics, weights
from tests.helpers.samplers import groups_of
from tests.helpers.scripts import ROOT, run_script
from training.collect import Collector
from training.offsets import in_tokens
from training.updates import Updater

PLUGIN = f"{ROOT}/tests/helpers/environments.py"
TRAINED = [name for name in FAMILIES if find_family(FAMILIES[name].config(TEXT, TOKENS)).turns]


pytestmark = pytest.mark.usefixtures("environments")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, so that identical runs give bit-identical results even on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def with_more_stops(folder: pathlib.Path) -> str:
    """Let about a third of all tokens end a turn."""
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(80)]}))
    return str(folder)


@pytest.fixture(scope="module")
def talker(tiny_model, tmp_path_factory) -> str:
    """The tiny model with 80 more stop tokens, so that most completions have several turns."""
    return with_more_stops(shutil.copytree(tiny_model, tmp_path_factory.mktemp("talker") / "model"))


# --- what the samplers return -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*slow("qwen2_vl"), *(name for name in TRAINED if name != "qwen2_vl")])
def test_sampler_and_trainer_agree_on_every_turn(family, tmp_path):
    """Also without a copy of the weights, and in smaller batches. The positions are the model's own.

    What was sampled is what is trained on, also where it is no text: the bytes of a random model rarely are.
    """
    model = with_more_stops(pathlib.Path(save_tiny(family, tmp_path)))
    processor = use_environment(load_processor(model, "count"), "pictures", 4, 400)
    pictures = family in WITH_IMAGES
    images = [[Image.linear_gradient("L").resize((84, 56))], []] if pictures else [[], []]
    samples = [make_sample(f"How many, {i}?", "3", each, f"row {i}") for i, each in enumerate(images)]
    samples = [replace(sample, fields={"pictures": pictures}) for sample in samples]
    prompts = [encode_prompt(sample, processor) for sample in samples]
    policy = load_policy(model, PolicyFlags(), torch.device("cpu"))
    sampling = Sampling(6, 24)
    copy = HFEngine(load_model(model, torch.float32).eval(), processor.tokenizer)
    own = PolicyEngine(policy, processor.tokenizer)
    own.max_sequences = 6  # one prompt at a time
    by_engine = [groups_of(engine, prompts, [3, 4], sampling, Episodes(samples, processor)) for engine in (copy, own)]
    for one, other in zip(*(itertools.chain(*groups) for groups in by_engine)):
        assert torch.equal(one.trajectory.ids, other.trajectory.ids)
        torch.testing.assert_close(one.sampling_logp, other.sampling_logp, atol=1e-4, rtol=0)
    rollouts = by_engine[0]
    groups = [
        Group(prompt, [rollout.prepared(0.0, 1.0) for rollout in group]) for prompt, group in zip(prompts, rollouts)
    ]
    with torch.no_grad():
        logp, _ = policy(pack(groups))
    everyone = [(prompt, rollout) for prompt, group in zip(prompts, rollouts) for rollout in group]
    print("DIFF", family, (logp - torch.cat([r.sampling_logp for _, r in everyone])).abs().max())
    torch.testing.assert_close(logp, torch.cat([r.sampling_logp for _, r in everyone]), atol=1e-4, rtol=0)
    assert {len(r.trajectory.turn_lengths) for _, r in everyone} >= {2, 3}
    assert sum(len(r.trajectory.images) for _, r in everyone) >= (8 if pictures else 0)
    rebuilt = 0
    for prompt, rollout in everyone:
        seen = rollout.trajectory
        assert torch.equal(rollout.ids, seen.ids[seen.loss_mask])
        assert sum(seen.turn_lengths) == len(rollout.ids) == len(rollout.sampling_logp) <= 24
        assert len(prompt.ids) + int((~seen.loss_mask).sum()) <= 400
        rebuilt += processor.tokenizer(rollout.text).input_ids == rollout.ids[-seen.turn_lengths[-1] :].tolist()
        assert seen.ids.tolist() == processor_expands(processor, seen)
        if hasattr(policy.model.model, "get_rope_index"):
            whole, grids = torch.cat([prompt.ids, seen.ids]), [p.vision.get("image_grid_thw") for p in (prompt, seen)]
            grids = [grid for grid in grids if grid is not None]
            is_image = torch.cat([prompt.ids == prompt.image_token, (seen.ids == seen.image_token) & ~seen.loss_mask])
            inputs = {"image_grid_thw": torch.cat(grids) if grids else None, "mm_token_type_ids": is_image.int()[None]}
            positions = policy.model.model.get_rope_index(whole[None], **inputs)[0][:, 0]
            assert torch.equal(torch.cat([prompt.position_ids, seen.position_ids], 1), positions)
    assert rebuilt < len(everyone) / 2


def test_turns_do_not_depend_on_how_long_tools_take_or_on_memory(talker, shapes, monkeypatch):
    """Bit for bit, with the first tools as the last to answer; and up to rounding where memory runs out in between."""
    processor = use_environment(load_processor(talker, "count"), "pictures", 4, 400)
    samples = data.load_samples(shapes, "count", processor=processor)[:2]
    prompts = [encode_prompt(sample, processor) for sample in samples]
    engine, forward, calls = HFEngine(load_model(talker, torch.float32).eval(), processor.tokenizer), None, []

    def sample() -> list[Rollout]:
        groups = groups_of(engine, prompts, [3, 4], Sampling(4, 12), Episodes(samples, processor))
        return list(itertools.chain(*groups))

    def run_out(**inputs: object) -> tuple:
        calls.append(inputs)
        if len(calls) == 8:
            raise torch.OutOfMemoryError("out of memory")
        return forward(**inputs)

    want, forward, then, order = sample(), engine._forward, Episodes.then, []

    def slow_then(self, number, output):
        time.sleep(0.02 * (8 - number))
        order.append(number)
        return then(self, number, output)

    with monkeypatch.context() as patch:
        patch.setattr(Episodes, "then", slow_then)
        for one, other in zip(want, sample(), strict=True):
            assert torch.equal(one.trajectory.ids, other.trajectory.ids) and one.env_reward == other.env_reward
            assert torch.equal(one.sampling_logp, other.sampling_logp)
    assert order[:8] == [7, 6, 5, 4, 3, 2, 1, 0]
    engine._forward = run_out
    for one, other in zip(want, sample(), strict=True):
        assert torch.equal(one.trajectory.ids, other.trajectory.ids) and one.env_reward == other.env_reward
    assert engine.max_sequences == 4 and len(calls) > 12


def processor_expands(processor, seen: Trajectory) -> list[int]:
    """Return the tokens of a trajectory, made from what a sampler that takes images gets."""
    ids, images = [], iter(seen.images)
    for token in seen.engine_ids:
        is_image = token == processor.image_token_id and not (seen.loss_mask & (seen.ids == token)).any()
        ids += processor.image_ids(processor.preparation.count(*next(images).size[::-1])) if is_image else [token]
    return ids


# --- the loss ---------------------------------------------------------------------------------------------------------

LOGP, OLD, REF = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.8, -0.7]), torch.tensor([-1.2, -1.9, -0.6])
SAMPLED = torch.tensor([True, False, False, True, False, True, False, False, False])


def loss_and_gradient(cfg: Config, observed: int) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Return the loss, its sums and its gradient for a completion of three tokens, and `observed` ones around them."""
    prompt = Prompt(torch.arange(2), [], torch.arange(2)[None])
    sampled = SAMPLED if observed else SAMPLED[SAMPLED]
    ids = torch.where(sampled, 5, 7)
    trajectory = Trajectory(ids, [], 2 + torch.arange(len(ids))[None], loss_mask=sampled) if observed else None
    trained = {"advantage": 2.0, "token_weight": 0.5, "trainer_logp": OLD, "ref_logp": REF}
    completion = Completion(torch.tensor([5, 5, 5]), OLD - torch.tensor([0.3, -0.1, 0.1]), **trained)
    batch = pack([Group(prompt, [replace(completion, trajectory=trajectory)])])
    logp, entropy = LOGP.clone().requires_grad_(), torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    loss, sums = grpo.batch_loss(cfg, batch, logp, entropy)
    loss.backward()
    return loss.detach(), sums, logp.grad


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_the_gradient_is_that_of_the_sampled_tokens(loss_type):
    """By hand, with two updates per step, a KL term and wide clip bounds. Six observed tokens change nothing."""
    cfg = Config(
        data="x",
        loss_type=loss_type,
        importance_cap=1.3,
        beta=0.1,
        num_iterations=2,
        clip_low=0.9,
        clip_high=3.0,
    )
    grpo.resolve_loss(cfg)
    loss, sums, gradient = loss_and_gradient(cfg, observed=6)
    plain_loss, plain_sums, plain_gradient = loss_and_gradient(cfg, observed=0)
    assert torch.equal(gradient, plain_gradient) and torch.equal(loss, plain_loss)
    assert {name: value.item() for name, value in sums.items()} == {n: v.item() for n, v in plain_sums.items()}
    assert sums["tokens"] == 3
    importance = torch.tensor([0.3, -0.1, 0.1]).exp().clamp(max=1.3)
    ratio = (LOGP - OLD).exp()
    if loss_type == "gspo":  # d(mean log-ratio)/d logp = 1/3 of three tokens, not of nine
        ratio = (LOGP - OLD).mean().exp() * importance.expand(3).mean()
        importance = torch.tensor(1.0)
    kl = 0.1 * (1 - (REF - LOGP).exp())
    want = 0.5 * (-2.0 * ratio * importance + kl)
    torch.testing.assert_close(gradient, want)


def test_an_entropy_bonus_is_that_of_the_sampled_tokens(monkeypatch):
    def objective(logp, log_ratio, advantages, batch, cfg, entropy):
        return advantages * logp + 10 * entropy, torch.zeros_like(logp).bool()

    monkeypatch.setitem(grpo.LOSSES, "bonus", grpo.Loss(objective, "tokens", 0.2, 0.2, needs_entropy=True))
    cfg = Config(data="x", loss_type="bonus", importance_cap=0.0)
    grpo.resolve_loss(cfg)
    loss, _, gradient = loss_and_gradient(cfg, observed=6)
    assert loss.item() == pytest.approx(0.5 * (2.0 * 3.5 - 10 * 0.6)) and gradient.tolist() == [-1.0] * 3


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_spans_are_those_of_the_last_turn(talker, opening):
    """Rewards see its text. By hand: 2 tokens of the first turn come before."""
    processor = load_processor(talker, "count")
    turns = [processor.tokenizer(text).input_ids for text in ("é", "aé 1+2=3<|im_end|>")]
    assert [len(each) for each in turns] == [2, 10]
    ids = torch.tensor(turns[0] + [9] + turns[1])
    sampled = torch.tensor([True] * 2 + [False] + [True] * 10)
    trajectory = Trajectory(ids, [], ids[None], opening=opening, loss_mask=sampled, turn_lengths=[2, 10])
    rollout = Rollout(ids[sampled], ids[sampled].float(), text=f"{opening}aé 1+2=3", trajectory=trajectory)
    n = len(opening)
    spans = tuple(Span(n + start, n + end, Rewards(1.0)) for start, end in ((1, 2), (3, 8)))
    prompt = Prompt(torch.arange(2), [], torch.arange(2)[None], opening="<answer>")
    group = ScoredGroup(None, prompt, [rollout], [Rewards(1.0, spans=spans)], 0)
    (rewards,) = in_tokens(group, processor)
    first, second = rewards.spans
    assert (first.start, first.end, second.start, second.end) == (3, 5, 6, 11)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Two completions: three turns with a picture of two tokens and a failed call, and a turn without a call."""
    sampled = torch.tensor([True, True, False, False, False, True, False, True])
    ids = torch.tensor([1, 1, 7, 9, 9, 1, 7, 1])
    first = Trajectory(ids, [], ids[None], image_token=9, loss_mask=sampled, turn_lengths=[2, 1, 1])
    first.num_calls, first.num_failed = 2, 1
    second = Trajectory(ids[:2], [], ids[None, :2], image_token=9, loss_mask=sampled[:2], turn_lengths=[2])
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    rollouts = [Rollout(ids[sampled], logp, trajectory=first), Rollout(ids[:2], logp[:2], trajectory=second)]
    assert turn_metrics(rollouts) == {
        "turns/mean": 2.0,
        "turns/calls": 1.0,
        "turns/with_call": 0.5,
        "turns/calls_failed": 0.5,
        "turns/text_tokens_seen": 1.0,
        "turns/image_tokens_seen": 1.0,
    }
    one, other = (rollout.prepared(1.0, 1.0) for rollout in rollouts)
    other = replace(other, trainer_logp=torch.tensor([-1.0, -1.5]))  # as with dropout
    groups = [Group(Prompt(ids, [], ids[None]), [one]), Group(Prompt(ids, [], ids[None]), [other])]
    found = difference_by_turn(groups, [torch.tensor([-1.5, -1.0, -2.0, -1.0]), torch.full((2,), -9.0)], max_turns=4)
    assert [*found] == [f"sampling/logp_difference_turn_{turn}" for turn in (1, 2, 3, 4)]
    assert [*found.values()][:3] == [(0.5 + 0.5) / 4, 1.0, 0.0] and math.isnan([*found.values()][3])


@needs("parts/pages")
def test_the_page_of_a_run_shows_its_turns(run):
    (group, *_) = read_jsonl(run / "completions.jsonl")
    turns = [turn for completion in group["completions"] for turn in completion["turns"]]
    seen = [turn for turn in turns if turn["role"] == "tool"]
    assert len(seen) > 4 and all([*part] == ["text"] for turn in turns if turn not in seen for part in turn["parts"])
    pictures = [part["image"] for turn in seen for part in turn["parts"] if "image" in part]
    page = (run / "completions.html").read_text()
    assert len(pictures) == 2 * len(seen) and all(picture in page for picture in pictures)
    assert '<div class="tool">Look: <img alt="what the model saw" src="data:image/webp;base64,' in page


def test_the_metrics_of_a_run_tell_of_its_turns(run):
    for row in read_jsonl(run / "metrics.jsonl")[1:]:
        assert row["turns/mean"] == pytest.approx(row["turns/calls"] + 1, abs=0.5) and row["turns/with_call"] > 0.5
        assert min(row["turns/image_tokens_seen"], row["turns/text_tokens_seen"]) > 0 == row["turns/calls_failed"]
        assert max(row[f"sampling/logp_difference_turn_{turn}"] for turn in (1, 2, 3)) < 1e-4
        assert row["sampling/logp_difference_turn_4"] is None, "the third turn is the last"


# --- whole runs -------------------------------------------------------------------------------------------------------

TURNS = {"env": "pictures", "max_completion_length": 16, "max_prompt_length": 400}


@pytest.fixture(scope="module")
def run(talker, shapes, tmp_path_factory) -> pathlib.Path:
    """Return the folder of a run of three steps with a checkpoint after each."""
    output = tmp_path_factory.mktemp("turns") / "run"
    grpo.main(
        config(
            talker, shapes, output, max_steps=3, save_every=1, eval_data=shapes, eval_every=3, report_every=1, **TURNS
        )
    )
    return output


def test_an_environment_that_ends_at_once_changes_nothing(brief_model, shapes, tmp_path):
    for name, flags in (("with", {"env": "over"}), ("without", {})):
        grpo.main(config(brief_model, shapes, tmp_path / name, max_steps=3, beta=0.01, **flags))
    one, other = weights(tmp_path / "with" / "final"), weights(tmp_path / "without" / "final")
    assert all(torch.equal(one[name], other[name]) for name in one)
    start = weights(pathlib.Path(brief_model))
    assert any(not torch.equal(one[name], start[name]) for name in one)


@pytest.mark.parametrize(
    "flags",
    [
        dict(loss_type="grpo", lora_rank=4, beta=0.01, num_iterations=2),
        dict(loss_type="dapo", dynamic_sampling_rounds=2, importance_cap=0.0, overlong_buffer=8),
        *slow(
            dict(loss_type="dr_grpo", advantage="none", train_vision=True, engine="policy", beta=0.01),
            dict(loss_type="gspo", advantage="gdpo", num_iterations=2, prompts_per_update=2, mask_truncated=True),
        ),
        dict(loss_type="cispo", old_logp="sampler", reward=("count=0", f"{ROOT}/tests/helpers/environments.py:parts")),
    ],
    ids=lambda flags: flags["loss_type"],
)
def test_a_run_takes_turns_with_every_loss(flags, talker, shapes, tmp_path, monkeypatch):
    """The trainer's log-probabilities are the sampler's, and lengths count what was sampled."""
    collected = []
    gather = Collector._gather

    def recorded(self, groups, rows):
        collected.extend(rollout for group in groups for rollout in group.rollouts)
        return gather(self, groups, rows)

    monkeypatch.setattr(Collector, "_gather", recorded)
    grpo.main(config(talker, shapes, tmp_path, max_steps=1, report_every=1, **TURNS | flags))
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["sampling/logp_difference_max"] < 1e-4 and row["loss"] is not None and row["grad_norm"] > 0
    kept = collected[-16:] if row["groups_drawn"] == 4 else collected
    assert row["completions/max_length"] <= max(len(rollout.ids) for rollout in kept) <= 16
    assert sum(len(rollout.trajectory.ids) > 60 for rollout in collected) > 4
    assert row["rewards/pictures"] == pytest.approx(
        sum(rollout.env_reward for rollout in collected) / len(collected), abs=1e-6
    )
    if extra("pages"):
        groups = read_jsonl(tmp_path / "completions.jsonl")
        shown = [turn for group in groups for completion in group["completions"] for turn in completion["turns"]]
        page = (tmp_path / "completions.html").read_text()
        assert sum(turn["role"] == "tool" for turn in shown) == page.count('<div class="tool">') > 4
        assert ("background: hsl" in page) == ("reward" in flags), "tokens with advantages of their own are coloured"


def test_faulty_tools_end_no_run(talker, shapes, tmp_path, monkeypatch, capsys):
    flags = TURNS | {"env": "failing", "max_prompt_length": 600, "max_turns": 2}
    monkeypatch.setattr("parts.turns.episodes._reported", set())
    grpo.main(config(talker, shapes, tmp_path, max_steps=1, beta=0.01, **flags))  # all rewards are equal
    printed = capsys.readouterr().err
    assert printed.count("note: a call of --env failed, and the model was told: ") > 4
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["rewards/failing"] == 0 and row["sampling/logp_difference_max"] < 1e-4


def flags_of(talker: str, shapes: str, output: pathlib.Path, env: str = "pictures", **more: object) -> list[str]:
    flags = dict(model=talker, data=shapes, output=output, plugin=PLUGIN, prompts_per_step=4, num_generations=4)
    flags |= dict(
        task="count", report_every=0, learning_rate=1e-3, max_steps=3, save_every=1, eval_data=shapes, eval_every=3
    )
    return [f"--{name}={value}" for name, value in (flags | TURNS | {"env": env} | more).items()]


@pytest.mark.slow
def test_two_processes_take_the_same_turns_as_one(run, talker, shapes, tmp_path):
    done = run_script("grpo.py", *flags_of(talker, shapes, tmp_path / "run"), processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    compared = {"reward", "rewards/pictures", "completions/mean_length", "loss", "grad_norm", "eval/reward"}
    for one, two in zip(metrics(run), metrics(tmp_path / "run"), strict=True):
        for name in compared & one.keys():
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name
    from parts.run_flags import run_flags

    scored_with = run_flags(tmp_path / "run", set())
    assert (scored_with["env"], scored_with["plugin"]) == ("pictures", [PLUGIN])
    one, two = weights(run / "final"), weights(tmp_path / "run" / "final")
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-3


@needs("parts/plugins.py")
def test_a_run_killed_in_the_middle_of_a_turn_resumes_bit_for_bit(run, talker, shapes, tmp_path):
    (tmp_path / "marks").mkdir()
    environment = {**os.environ, "MARKS": str(tmp_path / "marks")}
    flags = flags_of(talker, shapes, tmp_path / "run", "killer", eval_every=0)
    killed = run_script("grpo.py", *flags, env=environment)
    assert killed.returncode == -signal.SIGKILL
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-?")}
    assert "checkpoint-3" not in names and names, "it was killed after a checkpoint"
    done = run_script("grpo.py", *flags, "--resume", env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert difference(run / "checkpoint-3", tmp_path / "run" / "checkpoint-3", tmp_path) == 0.0
    assert [row["completions/mean_length"] for row in metrics(run)[1:]] == [
        row["completions/mean_length"] for row in metrics(tmp_path / "run")[1:]
    ]


PARTIAL = dict(env="varied", max_turns=6, max_completion_length=60, max_prompt_length=600)
PARTIAL |= dict(oversample=3.0, max_staleness=3, prompts_per_step=2, num_generations=2)


@needs("parts/partial.py")
def test_partial_rollouts_take_turns(talker, shapes, tmp_path):
    """An episode that is interrupted goes on in the next step. A resumed run is the uninterrupted one, bit for bit."""
    flags = dict(max_steps=4, save_every=2) | PARTIAL
    grpo.main(config(talker, shapes, tmp_path / "whole", **flags))
    rows = metrics(tmp_path / "whole")
    assert any(row["partial/groups_unfinished"] for row in rows) and any(row["partial/tokens_of_age_1"] for row in rows)
    assert max(row["turns/mean"] for row in rows) > 1.5
    differences = [row[f"sampling/logp_difference_turn_{turn}"] for row in rows for turn in (1, 2, 3)]
    assert max(difference for difference in differences if difference is not None) < 1e-4
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    in_flight = torch.load(tmp_path / "run" / "checkpoint-2" / "in_flight.pt", weights_only=True)
    waiting = [rollout for each in in_flight for rollout in each["rollouts"] if not rollout["finished"]]
    assert any(rollout["trajectory"]["turn_lengths"] for rollout in waiting), "in the middle of an episode"
    grpo.main(config(talker, shapes, tmp_path / "run", resume="newest", **flags))
    one, other = weights(tmp_path / "whole" / "final"), weights(tmp_path / "run" / "final")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(tmp_path / "whole")[2:] == metrics(tmp_path / "run")


@pytest.mark.slow
@needs("parts/partial.py")
def test_episodes_in_flight_move_between_processes(talker, shapes, tmp_path):
    """With their pictures: what they have seen is what the trainer sees."""
    flags = flags_of(talker, shapes, tmp_path, save_every=0, eval_every=0, max_steps=6, **PARTIAL)
    done = run_script("grpo.py", *flags, processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [row for row in metrics(tmp_path) if "reward" in row]
    assert any(row["partial/groups_unfinished"] for row in rows) and any(row["partial/tokens_of_age_1"] for row in rows)
    differences = [row[f"sampling/logp_difference_turn_{turn}"] for row in rows for turn in (1, 2, 3)]
    assert max(difference for difference in differences if difference is not None) < 1e-4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5"])
def test_a_teacher_sees_the_turns(family, shapes, tmp_path, monkeypatch):
    """The model itself, as its own teacher, gives the trainer's log-probabilities, also behind pictures."""
    model, seen = with_more_stops(pathlib.Path(save_tiny(family, tmp_path / "model"))), []
    if family == "qwen2_5":
        rows = [json.dumps({"prompt": f"How many, {i}?", "answer": "3", "pictures": False}) + "\n" for i in range(8)]
        (tmp_path / "rows.jsonl").write_text("".join(rows))
    with_logprobs = Updater.with_logprobs

    def recorded(self, policy, minibatches, name):
        done = with_logprobs(self, policy, minibatches, name)
        seen.extend(group for groups in done for group in groups)
        return done

    monkeypatch.setattr(Updater, "with_logprobs", recorded)
    data_file = shapes if family == "qwen2_5_vl" else f"{tmp_path}/rows.jsonl"
    flags = TURNS | dict(teacher=model, reward=("count=0", "pictures=0"), max_steps=1, report_every=0)
    grpo.main(config(model, data_file, tmp_path / "run", **flags))
    pairs = [(each.teacher_logp, each.sampling_logp) for group in seen for each in group.completions]
    assert max((teacher - own).abs().max() for teacher, own in pairs) < 1e-5
    turns = [len(each.trajectory.turn_lengths) for group in seen for each in group.completions]
    assert len(pairs) == 16 and max(turns) > 1
    (row,) = metrics(tmp_path / "run")
    assert abs(row["teacher_kl"]) < 1e-5
    with pytest.raises(UserError, match="--teacher: with --env, a teacher sees what the model sees: leave --teacher_"):
        grpo.main(config(model, data_file, tmp_path / "more", teacher_pixels=10**6, **flags))


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(run, shapes) -> pathlib.Path:
    folder = run.parent / "after"
    from parts.run_flags import run_flags

    flags = run_flags(run, set()) | {"baseline": None, "output": str(folder), "n": 2, "temperature": 1.0}
    assert (flags["env"], flags["max_completion_length"], flags["max_prompt_length"]) == ("pictures", 16, 400)
    evaluate.main(evaluate.Config(**flags))
    return folder


def test_an_evaluation_takes_turns_as_the_run_did(evaluated):
    predictions = read_jsonl(evaluated / "predictions.jsonl")
    assert len(predictions) == 12
    for row in predictions:
        given = zip(row["responses"], row["env_rewards"], strict=True)
        assert row["rewards"] == [rewards.count_reward(text, row["answer"]) + reward for text, reward in given]
    assert len({reward for row in predictions for reward in row["env_rewards"]}) > 2
    scores = json.loads((evaluated / "scores.json").read_text())
    assert scores["reward"] == pytest.approx(sum(sum(row["rewards"]) for row in predictions) / 24)
    calls = [number for row in predictions for number in row["calls"]]
    assert len(calls) == 24 and {1, 2} <= set(calls)
    assert scores["calls"] == pytest.approx(sum(calls) / 24)
    failed = [number for row in predictions for number in row["failed_calls"]]
    assert scores["failed_calls"] == pytest.approx(sum(failed) / 24)


def test_saved_predictions_keep_what_the_environment_gave(evaluated, tmp_path):
    flags = dict(predictions=str(evaluated / "predictions.jsonl"), task="count", output=str(tmp_path / "again"))
    evaluate.main(evaluate.Config(env="pictures", **flags))
    again, before = (read_jsonl(folder / "predictions.jsonl") for folder in (tmp_path / "again", evaluated))
    for column in ("rewards", "calls", "failed_calls"):
        assert [row[column] for row in again] == [row[column] for row in before]
    with pytest.raises(UserError, match="--env nope: choose one of"):
        evaluate.main(evaluate.Config(env="nope", **flags))
    lines = [json.dumps({"prompt": "q", "answer": "3", "response": "3"}) + "\n"]
    (tmp_path / "old.jsonl").write_text("".join(lines))
    flags = dict(predictions=str(tmp_path / "old.jsonl"), task="count", output=str(tmp_path / "old"))
    with pytest.raises(UserError, match="row 1: no 'env_rewards', which --env pictures gives when responses are sampl"):
        evaluate.main(evaluate.Config(env="pictures", **flags))


def test_an_evaluation_resumes_only_with_the_same_turns(run, shapes):
    def key(**flags: object) -> dict:
        return evaluate.resume_key(evaluate.Config(model=str(run / "final"), data=shapes, **flags), [])

    one = key(env="pictures", max_turns=3)
    assert {name for name, value in key(env="pictures", max_turns=2).items() if value != one[name]} == {"max_turns"}
    assert "env" in {name for name, value in key(env="over", max_turns=3).items() if value != one[name]}


@needs("parts/convert")
def test_show_prints_a_prompt_with_the_tools_of_its_environment(tiny_model, shapes):
    from parts import convert

    flags = dict(command="show", row=2, model=tiny_model, data=shapes, max_prompt_length=900)
    with_tool, without = (convert.show(convert.ShowFlags(**flags, env=env)) for env in ("zoom", None))
    assert '"name": "zoom"' in with_tool and "<tool_call>" in with_tool and "<tool" not in without


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(tensor_parallel=2), "env needs tensor_parallel 1: its processes would get answers out of step"),
        (dict(max_turns=0), "max_turns must be at least 1"),
        (dict(env=None, max_turns=2), "max_turns needs an environment: give env"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Config(**{"data": "rows", "env": "over"} | flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"env": "walk"}, r"^--env walk: choose one of .*\bpictures\b"),
        ({"env": "nameless"}, r"^--env nameless: it must be Environment\(FUNCTION\) .* with a name in the plugin"),
        ({"env": "awaited"}, r"^--env awaited: it must be .* of a plain function \(text, state, \*\*fields\)"),
        ({"env": "hint"}, "^12 of 12 rows cannot be used: .*: no 'hint', which the function of --env requires"),
        ({"env": "vqa"}, "^--env vqa: a reward has this name; rename the entry of ENVIRONMENTS"),
        ({"env": "over", "reward": ("own.py:over",)}, "^--reward own.py:over: a reward named 'over' already exists"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(flags, message, tiny_model, shapes, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    assert "\n" not in str(error.value)


def test_the_name_of_an_environment_is_missing_without_its_plugin(monkeypatch, tiny_model):
    monkeypatch.setattr("parts.turns.environment.ENVIRONMENTS", {})
    with pytest.raises(UserError, match=r"^--env zoom: add one with --plugin FILE$"):
        use_environment(load_processor(tiny_model, "count"), "zoom", 4, 400)


def test_pictures_are_not_counted_in_the_prompt_alone(tiny_model):
    processor = replace(load_processor(tiny_model, "count"), chat_variables={"add_vision_id": True})
    with pytest.raises(
        UserError, match=r"^--env over: --chat_template_kwargs add_vision_id does not count later pictures"
    ):
        use_environment(processor, "over", 4, 400)


@pytest.mark.parametrize(
    "tools",
    [{"type": "function"}, [{"name": "zoom"}], ["zoom"], [{"function": {"name": "a", "parameters": {1, 2}}}], 3],
)
def test_tools_that_are_no_schemas_are_refused(tools):
    with pytest.raises(ValueError, match=r"^tools: expected JSON schemas, "):
        Environment(print, tools)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TRAINED])
def test_families_without_a_test_of_turns_are_refused(family, tmp_path):
    processor = load_processor(save_tiny(family, tmp_path), "count")
    with pytest.raises(UserError, match=r"^--env over: .* cannot be trained on several turns yet; docs/turns.md says"):
        use_environment(processor, "over", 4, 400)


def test_a_run_resumes_with_its_own_environment(run, talker, shapes, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(UserError, match=r"belongs to another run \(env was pictures, is over\)"):
        grpo.main(config(talker, shapes, tmp_path / "run", resume="newest", max_steps=4, **TURNS | {"env": "over"}))


@needs("parts/plugins.py")
@needs("examples")
def test_a_sampler_without_turns_is_refused_in_one_line(talker, shapes, tmp_path):
    done = run_script(
        "grpo.py", *flags_of(talker, shapes, tmp_path), "--plugin=examples/http_sampler.py", "--engine=http"
    )
    assert done.returncode == 2
    assert re.search("^error: --engine http does not know `then`, by which turns go on: ", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_a_reward_may_ask_for_what_the_environment_gave(tmp_path):
    (tmp_path / "own.py").write_text("def own(completion, answer, env_reward):\n    return env_reward\n")
    flags = Config(data="x", env="pictures", reward=("pictures=0", "count=0", f"{tmp_path}/own.py:own=2"))
    scorer, sample = Scorer("count", flags), make_sample("q", "3", [], "row 1")
    scorer.check_columns([sample])
    (((scored,),), _) = scorer([sample], [[Rollout(torch.arange(2), torch.zeros(2), env_reward=0.75)]])
    assert scored.total == 1.5
    column = make_sample("q", "3", [], "row 1", {"env_reward": 7})
    without = Scorer("count", replace(flags, env=None, reward=flags.reward[1:]))
    (((scored,),), _) = without([column], [[Rollout(torch.arange(2), torch.zeros(2))]])
    assert scored.total == 14, "without an environment, it is a column like any other"
