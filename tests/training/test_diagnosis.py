"""Warnings: the history that makes each one appear, one that nearly does, healthy runs, and a dead run."""

import json
import math
import random
import re
import time

import pytest
from PIL import Image

import grpo
from common.files import read_jsonl
from tests.helpers.runs import config
from tests.helpers.scripts import VECTORS
from training.diagnosis import (
    COLLAPSED,
    FALLEN,
    FEW_CALLS,
    FIRST,
    GROWN,
    NEAR_ZERO,
    RECENT,
    WARNINGS,
    problems,
)
from training.run_log import RunLog

all_problems = pytest.importorskip("parts.pages.report", reason="needs parts/pages, which is not here").all_problems
LENGTH = "completions/mean_length"
HEALTHY = {"reward": 0.4, "frac_reward_zero_std": 0.5, "entropy": 0.3, "memory_flushes": 0, LENGTH: 30.0}
HEALTHY |= {"completions/format_rate": 0.9, "completions/clipped_ratio": 0.1}


def history(*changes: dict, steps: int = 0) -> list[dict]:
    """Return the metrics of `steps` healthy steps, and of a step with each of `changes`."""
    rows = [HEALTHY | change for change in [{}] * steps + list(changes)]
    return [{"step": step} | row for step, row in enumerate(rows, 1)]


def lasting(times: int, **values: float | None) -> list[dict]:
    return [{name.replace("__", "/"): value for name, value in values.items()}] * times


def rising(scores: dict[int, float], low: float = 0.2, high: float = 0.6) -> list[dict]:
    """Return steps whose reward rises, with the held-out exact match after some of them."""
    rewards = [low] * FIRST + [high] * FIRST
    return [{"reward": x} | ({"eval/exact_match": scores[i]} if i in scores else {}) for i, x in enumerate(rewards)]


CUT_OFF = {"completions__clipped_ratio": 0.6, "completions__format_rate": 0.4}
UNKNOWN = CUT_OFF | {"completions__format_rate": None}
APPEARS = {
    "signal": history(*lasting(RECENT, frac_reward_zero_std=1.0)),
    "format": history(*lasting(RECENT, completions__format_rate=0.0)),
    "cut off": history(*lasting(RECENT, **CUT_OFF)),
    "length": history(*lasting(RECENT, completions__mean_length=COLLAPSED * 30 - 1), steps=FIRST),
    "entropy": history(*lasting(RECENT, entropy=NEAR_ZERO / 2)),
    "calls": history(*lasting(FIRST, turns__with_call=0.8), *lasting(RECENT, turns__with_call=FEW_CALLS / 2)),
    "failed calls": history(*lasting(RECENT, turns__with_call=1.0, turns__calls_failed=1.0)),
    "reward": history(*lasting(FALLEN, reward=0.19), steps=FIRST),
    "held-out": history({"eval/exact_match": 0.25}, {"eval/exact_match": 0.5}, {"eval/exact_match": 0.25}),
    "empty": history(*lasting(RECENT, grad_norm=0.0)),
    "memory": history(*lasting(RECENT, memory_flushes=4)),
    "exact match": history(*rising({0: 0.5, 4: 0.5, 9: 0.4})),
}
DOES_NOT = {
    "signal": [
        history(*lasting(RECENT - 1, frac_reward_zero_std=1.0), steps=RECENT),
        history(*lasting(RECENT, frac_reward_zero_std=0.99)),
    ],
    "format": [
        history(*lasting(RECENT - 1, completions__format_rate=0.0), {"completions/format_rate": 0.01}),
        history(*lasting(RECENT, completions__format_rate=None)),  # the reward does not depend on it
    ],
    "cut off": [
        history(*lasting(RECENT, **CUT_OFF | {"completions__clipped_ratio": 0.4})),
        history(*lasting(RECENT, **CUT_OFF | {"completions__format_rate": 0.6})),
        history(*lasting(FIRST, **UNKNOWN)),  # as in ./run.sh real, whose rewards differ
    ],
    "length": [
        history(*lasting(RECENT, completions__mean_length=COLLAPSED * 30 + 1), steps=FIRST),
        history(*lasting(RECENT, completions__mean_length=GROWN * 30 - 1), steps=FIRST),
        history(*lasting(RECENT, completions__mean_length=90.0), steps=FIRST - 1),  # it has not been long enough
    ],
    "entropy": [
        history(*lasting(RECENT, entropy=NEAR_ZERO * 2)),
        history(*lasting(RECENT, entropy=None)),  # nothing was trained on
    ],
    "calls": [
        history(*lasting(FIRST, turns__with_call=0.8), *lasting(RECENT, turns__with_call=FEW_CALLS * 2)),
        history(*lasting(RECENT - 1, turns__with_call=0.0), steps=RECENT),
        history(steps=FIRST + RECENT),  # without an environment
    ],
    "failed calls": [
        history(*lasting(RECENT, turns__with_call=1.0, turns__calls_failed=0.99)),
        history(*lasting(RECENT - 1, turns__with_call=1.0, turns__calls_failed=1.0), steps=RECENT),
    ],
    "reward": [
        history(*lasting(FALLEN, reward=0.21), steps=FIRST),
        history(*lasting(FALLEN - 1, reward=0.0), steps=FIRST),
        history(*lasting(FIRST, reward=-0.5), *lasting(FALLEN, reward=-0.9)),  # half of a negative reward means nothing
    ],
    "held-out": [
        history({"eval/exact_match": 0.5}, {"eval/exact_match": 0.26}),
        history({"eval/exact_match": 0.0, "eval/reward": 0.0}, {"eval/exact_match": 0.0, "eval/reward": 0.0}),
        [{"step": 0, "eval/loss": 0.5}, {"step": 9, "loss": 0.1, "eval/loss": 0.9}],
        [{"step": 0, "eval/loss": 1e-3}, {"step": 9, "loss": 0.1, "eval/loss": 9e-3}],
    ],
    "empty": [history(*lasting(RECENT - 1, grad_norm=0.0), steps=RECENT)],
    "memory": [history({"memory_flushes": 9}, {}, {"memory_flushes": 9}, {"memory_flushes": 9})],
    "exact match": [
        history(*rising({0: 0.5, 4: 0.5, 9: 0.6})),
        history(*rising({0: 0.5, 9: 0.4})),  # a single evaluation may be bad luck
        history(*rising({0: 0.96, 4: 0.96, 9: 0.95})),
        history(*rising({0: 0.5, 4: 0.5, 9: 0.4}, high=0.2)),
    ],
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_appears(name):
    (line,) = problems(APPEARS[name]).values()
    assert list(problems(APPEARS[name])) == [name] and "\n" not in line and "{" not in line


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, rows in DOES_NOT.items() for i in range(len(rows))])
def test_a_warning_does_not_appear(name, index):
    assert DOES_NOT.keys() == WARNINGS.keys()
    assert not all_problems(DOES_NOT[name][index])


ALONE = {"reward": 0.0, "frac_reward_zero_std": 1.0, "teacher_kl": 0.1, "completions/format_rate": None}


@pytest.mark.parametrize(
    "rows",
    [
        history(*[ALONE | {"completions/clipped_ratio": x} for x in (0.0, 0.0, 0.9, 1.0, 1.0)]),
        history(*lasting(RECENT, **UNKNOWN), steps=FIRST),  # of a plugin's task: fewer were cut off before
    ],
)
def test_cut_off_completions_of_an_unknown_format_are_not_taken_for_fine(rows):
    assert list(problems(rows)) == ["cut off"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "eval/exact_match": 0.25}, {"step": 2, **ALONE, "eval/exact_match": 0.0}],
        [
            {"step": 0, "eval/exact_match": 0.0, "eval/reward": 0.4},
            {"step": 2, "eval/exact_match": 0, "eval/reward": 0.2},
        ],
        [{"step": 0, "eval/loss": 0.4}, {"step": 9, "loss": 0.1, "eval/loss": 0.8}],  # of sft.py
    ],
)
def test_a_held_out_score_that_halves_is_told_in_every_kind_of_run(rows):
    rows.insert(1, {"step": 1})
    assert list(problems(rows)) == ["held-out"] and not problems(rows[:1])


def test_with_a_teacher_its_kl_stands_in_the_line_of_a_step(tmp_path, capsys):
    more = {"step_time": 1.0, "teacher_kl": 0.123}
    for name, change, expected in (
        ("alone", ALONE | more, "step 1/2  teacher_kl 0.123  30 tokens  1.0 s  "),
        ("both", more, "step 1/2  reward 0.400  teacher_kl 0.123  30 tokens  1.0 s  "),
    ):
        log, (row,) = RunLog(str(tmp_path / name), {}), history(change)
        log.metrics(1, {name: math.nan if value is None else value for name, value in row.items()})
        log.print_step(1, 1, row)
        assert capsys.readouterr().err.startswith(expected)


def test_completions_that_double_and_collapse_are_described():
    longer = history(*lasting(RECENT, completions__mean_length=61.0), steps=FIRST)
    assert "from 30 to 61 tokens" in problems(longer)["length"]
    assert "from 30 to 9 tokens" in problems(APPEARS["length"])["length"]


@pytest.mark.parametrize("name", ["demo", "digits", "real"])
def test_a_healthy_run_has_no_warning(name):
    rows = json.loads((VECTORS / "histories.json").read_text())[name]
    steps = [row for row in rows if "reward" in row]
    assert len(steps) >= 7 and steps[-1].keys() >= {"reward", "entropy", LENGTH, "completions/format_rate"}
    assert not all_problems(rows)


def test_old_or_damaged_metrics_do_no_harm():
    assert not all_problems([{"step": 1}, {"step": 2, "reward": None}])
    assert not all_problems([{"step": step, "reward": 0.5, LENGTH: None} for step in range(20)])


def test_the_problems_of_a_long_run_are_found_without_reading_all_its_rows_at_each_step():
    draw, chosen = (
        random.Random(0),
        {"reward": [None, 0, 0.1, 0.2, 0.3, 0.4, 1], "frac_reward_zero_std": [1, 1, 0.5], LENGTH: [1, 30]},
    )
    chosen |= {"eval/exact_match": [None, 0, 0.1, 0.9], "eval/reward": [0, -1, 1], "entropy": [0, 0, 1]}
    for _ in range(50):
        rows = [{"step": step} | {name: draw.choice(values) for name, values in chosen.items()} for step in range(90)]
        rows = [{name: value for name, value in row.items() if name == "step" or draw.random() < 0.95} for row in rows]
        at_each_step = [problems(rows[:steps]) for steps in range(len(rows), 0, -1)]
        assert all_problems(rows) == {name: line for found in at_each_step for name, line in found.items()}
    start = time.perf_counter()
    all_problems(history(steps=10_000))  # the time of each step must not grow with their number
    assert time.perf_counter() - start < 2


def said(log: RunLog, rows: list[dict], capsys) -> dict[int, str]:
    """Let `log` write `rows`; return the warning after each step that has one."""
    found = {}
    for row in rows:
        metrics = {name: math.nan if value is None else value for name, value in row.items() if name != "step"}
        log.metrics(row["step"], metrics)
        log.print_step(row["step"], 1, metrics)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        found |= {row["step"]: " ".join(lines)} if lines else {}
    return found


def test_a_warning_is_printed_once_also_after_a_resume(tmp_path, capsys):
    """A resumed run repeats the steps after its checkpoint, and what was printed about them."""
    rows = history(*lasting(8, frac_reward_zero_std=1.0))
    plain = said(RunLog(str(tmp_path / "plain"), {}), rows, capsys)
    assert list(plain) == [3] and "no group's rewards" in plain[3]
    for kept, expected in ((2, [3]), (3, []), (5, [])):
        folder = str(tmp_path / f"resumed-{kept}")
        said(RunLog(folder, {}), rows[:6], capsys)
        resumed = said(RunLog(folder, {}, resumed_step=kept), rows[kept:], capsys)
        assert list(resumed) == expected
        assert [row["step"] for row in read_jsonl(tmp_path / f"resumed-{kept}" / "metrics.jsonl")] == list(range(1, 9))


def test_a_dead_run_says_why_and_where_everything_is(tiny_model, tmp_path, capsys):
    """A model that was never taught the format is asked for a colour."""
    Image.new("RGB", (56, 56), "red").save(tmp_path / "red.png")
    row = {"prompt": "<image>Which colour is this?", "answer": "red", "images": ["red.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run = tmp_path / "run"
    flags = dict(task="vqa", max_steps=4, prompts_per_step=1)
    grpo.main(config(tiny_model, str(tmp_path / "rows.jsonl"), run, **flags))
    lines = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step 3/4  reward 0.000  signal 0%"))
    assert re.search(r"no group's rewards have differed for 3 steps.* completion: ['\"]\S", lines[first + 1])
    assert "no completion has the format that the task asks for" in lines[first + 2]
    assert [row["completions/format_rate"] for row in read_jsonl(run / "metrics.jsonl")] == [0.0] * 4
    assert [row["entropy"] for row in read_jsonl(run / "metrics.jsonl")] == [None] * 4, "nothing was trained on"
    closing = [line for line in lines[first:] if not line.startswith(("step ", "warning: "))]
    assert [line.split()[0] for line in closing[-5:]] == ["model", "metrics", "evaluate", "resume", "serve"]
