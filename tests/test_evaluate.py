"""Task scores, compared with numbers computed by hand."""

import json
import re

import pytest
import torch

from common.errors import UserError
from data import load_processor, load_samples
from evaluate import Config, free_share, main
from evaluation import held_out
from evaluation.metrics import pass_at_k, summarise
from evaluation.predictions import format_table, scores_by_answer
from policy.model import load_model
from sampling.hf_engine import HFEngine
from tests.helpers.scripts import VECTORS


@pytest.mark.parametrize("case", [json.loads(line) for line in (VECTORS / "pass_at_k.jsonl").read_text().splitlines()])
def test_pass_at_k_vectors(case):
    assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["want"], abs=1e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_the_impossible(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


def row(responses: list[str], exact: list[bool], rewards: list[float | None]) -> dict:
    judged = dict(responses=responses, exact=exact, rewards=rewards, answer="3")
    return judged | dict(lengths=[len(r) for r in responses], truncated=[False, True, False, False])


def test_scores_by_hand():
    rows = [
        row(["A photo of 3 cats"] * 4, [True] * 4, [1.0] * 4),
        row(["A photo of 3 cats", "3", "?", ""], [True, False, False, False], [1.0, 0.85, 0.0, 0.0]),
    ]
    scores = summarise(rows, "count")
    assert scores["n"] == 2
    assert scores["no_verdict"] == 0
    assert scores["completions_per_row"] == 4
    assert scores["exact_match"] == pytest.approx((1 + 1 / 4) / 2)
    assert "pass@1" not in scores, "it would be the same number under another name"
    assert scores["pass@4"] == 1.0
    assert scores["reward"] == pytest.approx((4 + 1.85) / 8)
    assert scores["format_rate"] == pytest.approx(5 / 8)
    assert scores["truncated"] == pytest.approx(2 / 8)
    assert scores["mean_length"] == pytest.approx((5 * 17 + 1 + 1 + 0) / 8)


def test_each_of_a_few_gold_answers_has_a_score():
    """Counts are in order of size; a completion without a verdict is left out."""
    given = [("A photo of 10 cats", [1, 1]), ("2", [0, 1]), ("A photo of 2 dogs", [0, 0]), ("10", [1, 1])] * 3
    rows = [
        dict(responses=["", ""], exact=[bool(value) for value in values], rewards=values, answer=answer)
        for answer, values in given
    ]
    rows[-1] |= {"exact": [True, False], "rewards": [1, None]}
    by_answer = scores_by_answer(rows, "count")["answer"]
    assert list(by_answer.items()) == [("2", {"n": 6, "score": 0.25}), ("10", {"n": 6, "score": 1.0})]
    scores = summarise(rows, "count") | {"task": "count", "parts": {"answer": by_answer}}
    table = format_table(scores, scores)
    assert re.search(r"^answer: 2 \(6\) +0\.250 +0\.250$", table, re.MULTILINE)
    assert list(scores_by_answer(rows, "vqa")["answer"]) == ["2", "10", "A photo of 10 cats", "A photo of 2 dogs"]
    names = [row | {"answer": f"name {i}"} for i, row in enumerate(rows)]
    assert not scores_by_answer(names, "vqa"), "most answers are answers to one row only"
    assert not scores_by_answer(rows[:1] + rows[3:4], "count"), "there is one answer"


@pytest.mark.parametrize("bad", [dict(n=0), dict(n=4), dict(temperature=-1.0), dict(top_p=0.0), dict(limit=-1)])
def test_config_refuses_what_cannot_work(bad):
    with pytest.raises(ValueError, match=r"must|needs"):
        Config(model="m", data="d", **bad)


def test_a_reward_is_not_silently_left_out_of_a_benchmark():
    with pytest.raises(ValueError, match="a benchmark has its own score and no reward"):
        Config(model="m", benchmark="mmstar", reward=("mine.py:brevity",))


def test_completions_without_verdict_are_left_out_and_counted():
    rows = [row(["a"] * 4, [True] * 4, [1.0] * 4) for _ in range(9)]
    rows.append(row(["a"] * 4, [False, False, False, True], [None, None, None, 1.0]))
    scores = summarise(rows, "count")
    assert scores["no_verdict"] == pytest.approx(3 / 40)
    assert scores["exact_match"] == 1.0
    assert scores["reward"] == 1.0
    assert scores["pass@4"] == 1.0  # computed over the rows with four verdicts
    with pytest.raises(UserError, match=r"14% of the completions have no verdict, .* \(slow took longer than 1 s\)"):
        summarise([*rows, row(["a"] * 4, [False] * 4, [None, None, None, 1.0])], "count", "slow took longer than 1 s")


def test_processes_that_share_an_engine_sample_as_often(tiny_model, shapes, monkeypatch):
    """This process is the second of two. It has no row in the last chunk, but it must join that chunk, too."""
    processor = load_processor(tiny_model, "count")
    samples = load_samples(shapes, "count", processor=processor)
    engine = HFEngine(load_model(tiny_model, torch.float32), processor.tokenizer)
    calls, generate = [], engine.generate
    monkeypatch.setattr(held_out, "CHUNK", 1)
    monkeypatch.setattr(held_out.distributed, "rank", lambda: 1)
    monkeypatch.setattr(held_out.distributed, "world_size", lambda: 2)
    first = [{"responses": ["of the first process"]}]
    monkeypatch.setattr(held_out.distributed, "all_gather", lambda value: [value, value])
    monkeypatch.setattr(
        engine, "generate", lambda requests, *a: (calls.append(len(requests)), generate(requests, *a))[1]
    )
    monkeypatch.setattr(held_out.distributed, "gather_shards", lambda items: [*first, *items])
    outputs = held_out.sample_rows(engine, processor, samples[:3], held_out.SamplingFlags(max_completion_length=4))
    assert calls == [1, 0]
    assert [output["responses"] for output in outputs[::2]] == [first[0]["responses"]] * 2
    assert len(outputs) == 3


@pytest.mark.parametrize(
    ("free", "flags", "share"), [(1.0, {}, 0.85), (0.5, {}, 0.48), (0.5, {"gpu_memory": 8.0}, 0.85)]
)
def test_vllm_gets_what_other_programs_leave(monkeypatch, free, flags, share):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 2**30))
    cfg = Config(model="model", data="rows", **flags)
    assert free_share(cfg, torch.device("cuda")) == pytest.approx(share)


def test_an_adapter_given_as_the_model_names_the_flag(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    cfg = Config(model=str(tmp_path), data="x.jsonl", output=f"{tmp_path}/out")
    with pytest.raises(UserError, match=r"is an adapter: give its base as --model, and it as --adapter$"):
        main(cfg)
