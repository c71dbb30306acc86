"""Rewards of parts of a completion, and an advantage for each token."""

import copy
import math
import time
from dataclasses import replace

import pytest
import torch

import grpo
from common.errors import StepFailed
from common.files import read_jsonl
from common.parts import extra
from common.records import Completion, Group, GroupRewards, Prompt, Rewards, Rollout, ScoredGroup, Span
from common.spans import as_tensors
from config import Config
from data import load_processor
from evaluation.scorer import Scorer
from packing import pack
from policy.forward import _from_logits, _TokenLogprobs
from tests.helpers.marks import needs, slow
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL, config, metrics
from tests.helpers.scripts import run_script
from training.offsets import in_tokens, token_starts


@pytest.fixture(scope="module")
def processor(tiny_model):
    return load_processor(tiny_model, "count")


def rollout_of(text: str, processor, opening: str = "") -> Rollout:
    ids = torch.tensor(processor.tokenizer(text, add_special_tokens=False).input_ids)
    return Rollout(ids, torch.zeros(len(ids)), text=opening + text)


def prompt(opening: str = "") -> Prompt:
    return Prompt(torch.arange(3), [0, 1, 2], torch.arange(3)[None], opening=opening)


# --- from characters to tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_token_starts_at_the_character_that_holds_its_first_byte(processor, opening):
    """The tiny tokenizer has a token for each byte."""
    rollout = rollout_of("aé答b", processor, opening)
    n = len(opening)
    assert token_starts(rollout, opening, processor) == [n, n + 1, n + 1, n + 2, n + 2, n + 2, n + 3]


def test_a_byte_that_begins_no_character_is_a_character_of_its_own(processor):
    first = rollout_of("é", processor).ids[:1]
    ids = torch.cat([first, first, rollout_of("aé", processor).ids])
    rollout = Rollout(ids, torch.zeros(len(ids)), text=processor.tokenizer.decode(ids))
    assert rollout.text == "\ufffd\ufffdaé"
    assert token_starts(rollout, "", processor) == [0, 1, 2, 3, 3]


def test_positions_never_fall(processor):
    rollout = rollout_of("a<|begin_of_box|>5", processor)  # the mark is no token here
    starts = token_starts(rollout, "", processor)
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] == 1


def test_marks_that_rewards_do_not_see_have_no_characters(processor):
    rollout = rollout_of("x<|begin_of_box|>5<|end_of_box|>y", processor)
    starts = token_starts(rollout, "", processor)
    assert [starts[0], starts[1], starts[-1]] == [0, 1, 2]


def test_a_tokenizer_that_decodes_otherwise_token_by_token_is_refused(processor):
    """A setting of transformers takes spaces before punctuation out of the whole text."""
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = rollout_of("a , b", processor).ids
    rollout = Rollout(ids, torch.zeros(len(ids)), text=tokenizer.decode(ids))
    with pytest.raises(StepFailed, match=r"^spans need a tokenizer that decodes token by token, but 'a, b' changes$"):
        token_starts(rollout, "", replace(processor, tokenizer=tokenizer))


def test_spans_are_counted_in_tokens_and_those_without_a_token_are_left_out(processor):
    rollout = rollout_of("答ab", processor)
    spans = tuple(Span(start, end, Rewards(1.0, 1.0)) for start, end in ((0, 1), (1, 3), (7, 9)))
    group = ScoredGroup(make_sample("q", "a", [], "x"), prompt(), [rollout], [Rewards(1.0, 1.0, {}, spans)], 0)
    (rewards,) = in_tokens(group, processor)
    first, second = rewards.spans
    assert (first.start, first.end, second.start, second.end) == (0, 3, 3, 5)


# --- what a reward may return -----------------------------------------------------------------------------------------


def scorer(tmp_path, body: str, *more: str) -> Scorer:
    (tmp_path / "own.py").write_text(f"def own(completion, answer):\n    return {body}\n")
    flags = Config(data="x", reward=("count=0", f"{tmp_path}/own.py:own=2", *more))
    return Scorer("count", flags, overlong_buffer=0)


def test_the_number_of_a_reward_of_spans_is_their_sum(tmp_path):
    score = scorer(tmp_path, "[(0, 2, 0.5), (4, 5, -1)]", "format")
    sample = make_sample("q", "3", [], "rows.jsonl row 1")
    (((rewards,),), error) = score([sample], [[Rollout(torch.arange(4), torch.zeros(4), text="3 abc")]])
    assert error is None
    assert rewards.total == 2 * -0.5
    assert [(s.start, s.end, s.rewards.total) for s in rewards.spans] == [(0, 2, 1.0), (4, 5, -2.0)]


@pytest.mark.parametrize(
    "body",
    [
        "[(0, 2)]",
        "[(2, 1, 0.5)]",
        "[(0, 3, 1), (2, 4, 1)]",
        "[(0, 1, float('nan'))]",
        "[(-1, 1, 1)]",
        "[(0, 10**5000, 1)]",
    ],
)
def test_spans_out_of_order_are_named(tmp_path, body):
    sample = make_sample("q", "3", [], "rows.jsonl row 1")
    _, error = scorer(tmp_path, body)([sample], [[Rollout(torch.arange(4), torch.zeros(4), text="3 abc")]])
    assert "own.py:own on rows.jsonl row 1" in error and "in order that do not overlap" in error


def scored_with(tmp_path, body: str, text: str, *more: str) -> tuple[Rewards, str | None]:
    rollout = Rollout(torch.arange(4), torch.zeros(4), text=text)
    (((rewards,),), error) = scorer(tmp_path, body, *more)([make_sample("q", "3", [], "row 1")], [[rollout]])
    return rewards, error


def test_numbers_of_numpy_are_numbers(tmp_path):
    values = "numpy.float32(0.5), numpy.uint8(200), numpy.float64(1), numpy.uint8(200)"
    body = f"[(numpy.int64(i), numpy.uint8(i + 1), x) for i, x in enumerate([{values}])]"
    rewards, error = scored_with(tmp_path, body.replace("numpy", "__import__('numpy')"), "abcd")
    assert error is None and rewards.total == 2 * 401.5
    assert {type(x) for each in rewards.spans for x in (each.start, each.end, each.rewards.total)} == {int, float}


def test_the_sum_of_spans_has_the_bound_of_a_reward(tmp_path):
    rewards, error = scored_with(tmp_path, "[(i, i + 1, 6e14) for i in range(2)]", "abcd")
    assert math.isnan(rewards.total) and "expected a finite number, or spans" in error


@needs("parts/workers.py")
def test_spans_beyond_the_end_are_told_once(tmp_path, capsys):
    score = scorer(tmp_path, "[(0, 2, 0.5), (4, 9, 1.0)]")
    rollouts = [Rollout(torch.arange(4), torch.zeros(4), text="3 abc") for _ in range(3)]
    _, error = score([make_sample("q", "3", [], "row 1")], [rollouts])
    told = "own returned a span that ends at 9, in a text of 5 characters: no token gets what lies beyond\n"
    printed = capsys.readouterr().err
    assert error is None and printed.startswith("note: ") and printed.endswith(told) and printed.count("note") == 1
    scored_with(tmp_path, "[(0, 5, 0.5)]", "3 abc")
    assert not capsys.readouterr().err


def test_many_spans_take_the_time_of_one_walk(tmp_path):
    """The square of their number would be 10^10 here, which no time limit would see."""
    (tmp_path / "other.py").write_text("def other(completion, answer):\n    return [(3, 99_999, 7.0)]\n")
    started = time.perf_counter()
    body = "[(i, i + 1, float(i)) for i in range(100_000)]"
    rewards, error = scored_with(tmp_path, body, "a" * 100_000, f"{tmp_path}/other.py:other")
    assert error is None and len(rewards.spans) == 100_000
    assert [rewards.spans[i].rewards.parts["other"] for i in (2, 3, 99_998, 99_999)] == [7.0] * 4
    assert rewards.spans[50].rewards.parts["own"] == 50.0
    assert time.perf_counter() - started < 30


def test_two_rewards_of_spans_are_added_where_they_overlap(tmp_path):
    (tmp_path / "other.py").write_text("def other(completion, answer):\n    return [(1, 4, 10.0)]\n")
    score = scorer(tmp_path, "[(0, 2, 1.0), (4, 5, 3.0)]", f"{tmp_path}/other.py:other")
    sample = make_sample("q", "3", [], "rows.jsonl row 1")
    (((rewards,),), _) = score([sample], [[Rollout(torch.arange(5), torch.zeros(5), text="abcde")]])
    # outside its own spans, a reward counts with its number: 2 · 4 and 10
    got = [(s.start, s.end, s.rewards.total) for s in rewards.spans]
    assert got == [(0, 1, 12.0), (1, 2, 12.0), (2, 4, 18.0), (4, 5, 16.0)]


# --- advantages -------------------------------------------------------------------------------------------------------


def group_rewards(spans: list[list[tuple[Span, ...]]], totals: list[list[float]]) -> GroupRewards:
    rewards = as_tensors([[Rewards(total, total, {"own": total}) for total in row] for row in totals])
    return GroupRewards(rewards.total, rewards.raw, rewards.parts, spans)


def span(start: int, end: int, value: float) -> Span:
    return Span(start, end, Rewards(value, value - 1, {"own": value}))


def test_spans_are_normalised_over_all_spans_of_their_group():
    """By hand: the spans 1, 3 and 5 have the mean 3 and the deviation 2."""
    spans = [[(span(0, 2, 1.0), span(3, 4, 3.0)), (span(1, 2, 5.0),)], [(), ()]]
    rewards = group_rewards(spans, [[4.0, 5.0], [1.0, 2.0]])
    cfg = Config(data="x", max_completion_length=5)
    got = grpo.advantages_of(rewards, {"own": 1.0}, cfg)
    assert got.shape == (2, 2, 5)
    half = 0.5 / (0.5**0.5 + 1e-6)  # the completions' own: ± half their difference over the deviation
    torch.testing.assert_close(got[0, 0], torch.tensor([-1.0, -1.0, -half, 0.0, -half]), atol=1e-5, rtol=0)
    torch.testing.assert_close(got[0, 1], torch.tensor([half, 1.0, half, half, half]), atol=1e-5, rtol=0)
    torch.testing.assert_close(got[1], torch.tensor([[-half] * 5, [half] * 5]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("advantage", list(grpo.ADVANTAGES))
def test_every_advantage_takes_spans_and_none_changes_without(advantage):
    spans = [[(span(0, 1, 1.0),), (span(0, 1, 0.0), span(1, 3, 1.0))]]
    cfg = Config(data="x", max_completion_length=3, advantage=advantage)
    with_spans = grpo.advantages_of(group_rewards(spans, [[1.0, 1.0]]), {"own": 1.0}, cfg)
    assert with_spans.shape == (1, 2, 3) and with_spans.isfinite().all()
    assert with_spans[0, 1, 0] < 0 < with_spans[0, 0, 0]
    assert with_spans[0, 0, 1:].eq(0).all(), "the sums are equal"
    assert grpo.advantages_of(group_rewards([[(), ()]], [[1.0, 0.0]]), {"own": 1.0}, cfg).shape == (1, 2)


def scored(lengths: list[int], totals: list[float]) -> ScoredGroup:
    rollouts = [Rollout(torch.arange(n), torch.zeros(n)) for n in lengths]
    return ScoredGroup(make_sample("q", "a", [], "x"), prompt(), rollouts, [Rewards(t, t) for t in totals], 0)


def test_a_completion_of_nan_is_neither_trained_nor_counted():
    cfg = Config(data="x", num_generations=4)
    group = scored([2, 3, 4, 5], [1.0, 0.0, 0.5, math.nan])
    advantages = torch.tensor([[1.0, -1.0, math.nan, 0.0]])
    ((trained),) = grpo.training_groups(cfg, [group], advantages)
    assert [len(each.ids) for each in trained.completions] == [2, 3]
    assert [each.token_weight for each in trained.completions] == pytest.approx([1 / (2 * 2), 1 / (2 * 3)])


def test_a_completion_is_left_out_only_if_all_its_advantages_are_zero(monkeypatch):
    cfg = Config(data="x", num_generations=2)
    advantages = torch.zeros(1, 2, 6)
    advantages[0, 0, 1] = 2.0
    advantages[0, 1, 5] = 2.0  # beyond its end
    ((trained),) = grpo.training_groups(cfg, [scored([3, 4], [1.0, 1.0])], advantages)
    assert [each.advantage.tolist() for each in trained.completions] == [[0.0, 2.0, 0.0]]
    assert trained.completions[0].token_weight == pytest.approx(1 / (2 * 3)), "the other counts"
    monkeypatch.setitem(
        grpo.LOSSES, "grpo", grpo.Loss(grpo.clipped_objective, "sequences", 0.2, 0.2, needs_entropy=True)
    )
    ((trained),) = grpo.training_groups(cfg, [scored([3, 4], [1.0, 1.0])], torch.zeros(1, 2))
    assert len(trained.completions) == 2


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_the_gradient_of_a_token_is_its_own_advantage_times_its_weight(loss_type):
    """By hand, at r = 1: −w · A_t, with a ratio per sequence as well (GSPO-token)."""
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0])
    batch = pack([Group(prompt(), [Completion(torch.arange(4), torch.zeros(4), advantage, 0.25)])])
    logp = torch.zeros(4, requires_grad=True)
    cfg = Config(data="x", loss_type=loss_type)
    grpo.resolve_loss(cfg)
    loss, _ = grpo.batch_loss(cfg, batch, logp)
    loss.backward()
    torch.testing.assert_close(logp.grad, -0.25 * advantage)


# --- the entropy ------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_entropy():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (7, 3)))
    targets, scale = torch.tensor([0, 1, 2, 3, 6]), torch.tensor(0.7, dtype=torch.float64)

    def plain(hidden, weight):
        logp = (hidden @ weight.T / scale).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def own(hidden, weight):
        def from_logits(*args):
            return _from_logits(*args, dtype=torch.float64)

        return _TokenLogprobs.apply(hidden, weight, targets, scale, from_logits, False, True)

    for take in (
        lambda out: (out[0] * torch.arange(5)).sum() - 3 * (out[1] * torch.arange(5)).sum(),
        lambda out: out[1].sum(),
    ):
        grads = [torch.autograd.grad(take(function(hidden, weight)), (hidden, weight)) for function in (plain, own)]
        for want, got in zip(*grads):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)  # logits are kept in float32


# --- a run ------------------------------------------------------------------------------------------------------------

CREDIT = """
def credit(completion, answer):
    value = 1.0 if is_even(completion) else -1.0
    return [(0, 1, value), (1, len(completion), -value)] if len(completion) > 1 else 0.0


def total(completion, answer):
    spans = credit(completion, answer)
    return float(sum(value for *_, value in spans)) if spans else 0.0


def is_even(completion, answer="", **_):
    return float(bool(completion) and ord(completion[0]) % 2 == 0)
"""


@pytest.mark.parametrize("seed", slow(0, 1, 2))
def test_rewards_of_parts_teach_what_their_sum_does_not(seed, tiny_model, shapes, tmp_path):
    """The first character should be even. What it earns is taken back from the rest, so that the sum is always 0."""
    (tmp_path / "own.py").write_text(CREDIT)
    flags = dict(prompts_per_step=8, num_generations=8, max_completion_length=4, seed=seed, max_steps=20, save_every=0)
    even = {}
    for name in ("credit", "total"):
        own = [f"{tmp_path}/own.py:{function}" for function in (name, "is_even=0")]
        grpo.main(config(tiny_model, shapes, tmp_path / name, reward=("count=0", *own), report_every=10, **flags))
        even[name] = [row["rewards/is_even"] for row in metrics(tmp_path / name)]
    assert sum(even["credit"][-5:]) / 5 > 0.8
    assert max(even["total"]) < 0.6
    if extra("pages"):
        groups = read_jsonl(tmp_path / "credit" / "completions.jsonl")
        parts = [part for group in groups for each in group["completions"] for part in each.get("parts", [])]
        page = (tmp_path / "credit/completions.html").read_text()
        assert parts and {text for text, _ in parts} and "background: hsl" in page


@needs("parts/pages")
def test_the_page_shows_an_unscored_completion_beside_one_with_parts(tiny_model, shapes, tmp_path, monkeypatch):
    monkeypatch.setattr("training.collect.MAX_UNSCORED", 1.0)
    value = "None if len(completion) % 2 else [(0, 1, float(len(completion)))]"
    (tmp_path / "own.py").write_text(f"def own(completion, answer):\n    return {value}\n")
    flags = dict(reward=("count=0", f"{tmp_path}/own.py:own"), max_steps=3, report_every=1, save_every=0)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags))
    groups = read_jsonl(tmp_path / "run" / "completions.jsonl")
    shown = {(each["advantage"] is None, "parts" in each) for group in groups for each in group["completions"]}
    assert shown == {(True, False), (False, True)}
    assert "left out" in (tmp_path / "run" / "completions.html").read_text()


@pytest.mark.slow
def test_a_run_with_spans_is_the_same_on_two_processes(tiny_model, shapes, tmp_path):
    """With partial rollouts, dynamic sampling and a KL term."""
    (tmp_path / "own.py").write_text(CREDIT)
    flags = SMALL | {"model": tiny_model, "data": shapes, "max_steps": 2, "learning_rate": 1e-3, "oversample": 1.5}
    flags |= {"reward": f"{tmp_path}/own.py:credit", "beta": 0.05, "dynamic_sampling_rounds": 2, "max_staleness": 1}
    losses = []
    for processes in (0, 2):
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        done = run_script("grpo.py", *arguments, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([row["loss"] for row in metrics(tmp_path / str(processes))])
    assert all(losses[0]) and losses[0] == pytest.approx(losses[1], abs=1e-5)
