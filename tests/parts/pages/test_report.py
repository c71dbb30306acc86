"""The page of sampled completions, the page of a run, and its curves."""

import contextlib
import errno
import json
import pathlib
import re

import pytest
import torch
from PIL import Image

import grpo
from common.errors import RunStopped, UserError
from common.files import read_jsonl
from common.records import Prompt, Rewards, Rollout, ScoredGroup
from tests.helpers.rows import make_sample
from tests.helpers.runs import config
from tests.helpers.scripts import run_script
from training.run_log import RunLog

pytest.importorskip("parts.pages", reason="needs parts/pages, which is not here")

from parts.pages import __main__, report
from parts.pages.report import (
    GROUPS_ON_PAGE,
    GROUPS_PER_REPORT,
    draw_curves,
    is_group,
    write_index,
    write_page,
)


def test_the_page_shows_text_as_text_and_marks_rewards(tmp_path):
    completions = [
        {"text": "<script>", "reward": 1.0, "advantage": 0.5, "truncated": False},
        {"text": "b", "reward": 0.5, "advantage": -0.5, "truncated": True},
        {"text": "c", "reward": None, "advantage": 0.0, "truncated": False},
        {"text": "d", "reward": -1.0, "advantage": 0.0, "truncated": False},
    ]
    row = {"step": 7, "source": "a.jsonl row 3", "question": "3 < 4 & 5?", "answer": "yes", "images": ["data:,"]}
    (tmp_path / "completions.jsonl").write_text(json.dumps(row | {"completions": completions}) + "\n")
    write_page(tmp_path)
    page = (tmp_path / "completions.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page and "3 &lt; 4 &amp; 5?" in page
    kinds = [line for line in page.splitlines() if line.startswith("<tr class")]
    assert kinds == ['<tr class="right">', '<tr class="near">', '<tr class="">', '<tr class="wrong">']
    assert "no verdict" in page and "+0.50" in page and page.count("truncated") == 1
    assert "<caption>step 7, mean 0.17</caption>" in page and "a.jsonl row 3" in page
    assert page.count("<img") == 1 and '<img alt="picture 1" src="data:,">' in page and "picture 2" not in page


def test_the_page_has_the_newest_groups_and_names_damaged_lines_by_their_numbers(tmp_path, capsys):
    row = {"source": "a.jsonl row 3", "question": "3?", "answer": "3", "images": [], "completions": []}
    lines = [json.dumps(row | {"step": step}) for step in range(1, GROUPS_ON_PAGE + 5)]
    lines[0], lines[-2] = "damaged, but too old to be read", "damaged"
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + "\n")
    write_page(tmp_path)
    steps = re.findall(r"<caption>step (\d+)", (tmp_path / "completions.html").read_text())
    assert [int(step) for step in steps] == [
        step for step in range(GROUPS_ON_PAGE + 4, 4, -1) if step != len(lines) - 1
    ]
    assert f"skipped the damaged line {len(lines) - 1} (1 in total)" in capsys.readouterr().err


def test_the_page_of_a_run_links_to_what_is_there(tmp_path):
    run = tmp_path / "a & b"
    for name in ("eval", "eval #2"):
        (run / name).mkdir(parents=True)
    for name in ("curves.png", "config.json", "eval/scores.json", "eval/scores.png", "eval #2/scores.json"):
        (run / name).touch()
    rows = [{"step": step, "reward": 0.0, "frac_reward_zero_std": 1.0} for step in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_index(run)
    page = (run / "index.html").read_text()
    assert "<h1>Run a &amp; b</h1>" in page and page.count("warning: no group&#39;s rewards") == 1
    assert re.findall(r'href="([^"]+)"', page) == ["metrics.jsonl", "config.json", "eval", "eval%20%232"]
    assert re.findall(r'src="([^"]+)"', page) == ["curves.png", "eval/scores.png"]


def test_the_page_of_a_run_says_what_it_is_and_what_it_has_reached(tmp_path):
    """Scores of an older step have it beside them."""
    config = {"model": "m/3B", "task": "vqa", "data": "a <b>.jsonl", "total_steps": 60}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=1))
    rows = [{"step": 0, "eval/exact_match": 0.25}, {"step": 20, "eval/exact_match": 0.5}, {"step": 40, "reward": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, step in (("early", 20), ("late", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps({"step": step}))
        (tmp_path / name / "scores.png").touch()
    write_index(tmp_path)
    page = (tmp_path / "index.html").read_text()
    for line in ("model: m/3B", "task: vqa", "data: a &lt;b&gt;.jsonl", "steps: 40 of 60"):
        assert f"{line}<br>" in page
    assert "held-out exact_match: 0.250 (step 0) → 0.500 (step 20)<br>" in page and "held-out loss" not in page
    assert "early</a> (of step 20)" in page and 'of step 20:<img alt="early/scores.png"' in page
    assert page.count("of step ") == 2


def test_an_evaluation_of_a_run_that_was_replaced_is_said_to_be_of_it(tmp_path):
    """A run with the same number of steps has replaced it, so the step alone does not tell."""
    rows = [{"step": 0, "eval/exact_match": 0.25}, {"step": 1, "step_time": 1.5}, {"step": 2, "step_time": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = {"first": (1, 1.5), "last": (2, 2.5), "replaced": (2, 2.6), "beyond": (9, 1.5), "unknown": (2, None)}
    for name, (step, step_time) in times.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps({"step": step, "step_time": step_time}))
    write_index(tmp_path)
    shown = re.findall(r'<a href="(\w+)">\w+</a>(?: \((.*?)\))?', (tmp_path / "index.html").read_text())
    assert dict(shown) == dict.fromkeys(("replaced", "beyond"), "of an earlier run") | {
        "first": "of step 1",
        "last": "",
        "unknown": "",
    }


def scored_group(name: str, step: int) -> ScoredGroup:
    """Return the group of a row with two images, whose reward is the sum of two."""
    image = Image.new("RGB", (8, 8))
    sample = make_sample("Is <image> or <image> larger?", "the first", [image, image], name)
    rollouts = [Rollout(torch.tensor([1]), torch.zeros(1), text=f"{name} at step {step}")]
    rewards = [Rewards(total=0.5, parts={"vqa": 1.0, "brevity": -0.5})]
    return ScoredGroup(sample, Prompt([], [], torch.zeros(1, 1), images=[image, image]), rollouts, rewards, 0)


def log_steps(log: RunLog, steps: dict[int, str]) -> None:
    """Log the rows of each step; a row has a letter."""
    for step, rows in steps.items():
        log.completions(step, [scored_group(row, step) for row in rows], torch.zeros(len(rows), 1))
        log.metrics(step, {"reward": 0.5})


def test_a_row_that_comes_again_is_logged_first_and_its_steps_are_side_by_side(tmp_path):
    log_steps(RunLog(str(tmp_path), {"report_every": 1}), {1: "abcd", 2: "efgb", 3: "dhia"})
    log_steps(RunLog(str(tmp_path), {"report_every": 1}, resumed_step=2), {3: "xyzc"})
    rows = read_jsonl(tmp_path / "completions.jsonl", is_group)
    assert "".join(row["source"] for row in rows) == "abc" + "bef" + "cxy" and GROUPS_PER_REPORT == 3
    articles = (tmp_path / "completions.html").read_text().split("<article>")[1:]
    shown = [re.findall(r"(\w) at step (\d)", article) for article in articles]
    assert shown == [[("y", "3")], [("x", "3")], [("c", "3"), ("c", "1")], [("f", "2")], [("e", "2")],
                     [("b", "2"), ("b", "1")], [("a", "1")]]  # fmt: skip


def test_pictures_are_numbered_in_their_places_and_a_sum_of_rewards_has_its_parts(tmp_path):
    log_steps(RunLog(str(tmp_path), {"report_every": 1}), {1: "a"})
    page = (tmp_path / "completions.html").read_text()
    text = re.sub(r' src="[^"]*"', "", page).replace("\n", " ")
    first, second = (f'picture {number}<img alt="picture {number}">' for number in (1, 2))
    assert f"<b>Is</b> {first}<b>or</b> {second}<b>larger?</b>" in text
    assert "<small>vqa 1.00, brevity -0.50</small>" in text


def test_the_last_step_is_always_on_the_page(tmp_path):
    """Also of a run that is shorter than `report_every`, that ends between two reports or that fails."""
    with contextlib.suppress(RunStopped), RunLog(str(tmp_path), {"report_every": 2}) as log:
        log_steps(log, {1: "abcd", 2: "efgb", 3: "dhia"})
        raise RunStopped("stopped", 1)
    with RunLog(str(tmp_path / "short"), {"report_every": 10}) as log:
        log_steps(log, {1: "abcd", 2: "efgb"})
    for folder, steps in ((tmp_path, "123"), (tmp_path / "short", "12")):
        logged = [row["step"] for row in read_jsonl(folder / "completions.jsonl", is_group)]
        assert logged == [int(step) for step in steps for _ in range(GROUPS_PER_REPORT)]
        assert set(re.findall(r"<caption>step (\d)", (folder / "completions.html").read_text())) == set(steps)


def test_damaged_log_lines_are_skipped_and_named(tmp_path, capsys):
    """They do not keep a run from being resumed, or from being drawn."""
    group = {"step": 1, "images": [], "completions": [{"text": "a", "reward": None, "advantage": 0.0}]}
    lines = {
        "metrics.jsonl": [{"step": 1, "reward": 0.5}, {"reward": 1}, {"step": "1"}, {"step": 2, "reward": "high"}],
        "completions.jsonl": [group, group | {"completions": [1]}, group | {"images": None}, {"step": 1}],
    }
    odd = [b'{"step": 1, "rew', b"[]", b"3", b"\0\0\0\0", b"\xff", b"[" * 100_000, b""]
    for name, rows in lines.items():
        text = b"\n".join([*(json.dumps(row).encode() for row in rows), *odd, json.dumps(rows[0]).encode(), b'{"st'])
        (tmp_path / name).write_bytes(text)
    RunLog(str(tmp_path), {"report_every": 10}, resumed_step=2)
    __main__.main(__main__.Config(run=str(tmp_path)))
    for name, rows in lines.items():
        assert read_jsonl(tmp_path / name) == [rows[0], rows[0]]
    stderr = capsys.readouterr().err
    for name in lines:
        assert f"{name}: skipped the damaged line 2 (10 in total)" in stderr
    assert len(stderr.splitlines()) == 2
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "completions.html").is_file()


def test_the_page_of_a_real_run_links_to_all_that_it_leaves(tiny_model, shapes, tmp_path, capsys):
    run = tmp_path / "run"
    grpo.main(config(tiny_model, shapes, run, max_steps=1, report_every=4))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[-6:]] == ["model", "metrics", "page", "evaluate", "resume", "serve"]
    linked = re.findall(r'(?:href|src)="([^"]+)"', (run / "index.html").read_text())
    assert linked == ["completions.html", "metrics.jsonl", "config.json", "final", "curves.png"]
    assert all((run / name).exists() for name in linked)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    done = run_script("-m", "parts.pages", f"--run={tmp_path}")
    line = f"error: no run in '{tmp_path}': pass the folder that grpo.py wrote (its --output)\n"
    assert (done.returncode, done.stderr) == (2, line)


def curves(folder: pathlib.Path, rows: list[dict], monkeypatch) -> dict[str, list[list[float]]]:
    """Return the values of each line in the panels of a run's picture, by the panel's title."""
    drawn = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: drawn.append(figure))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curves(folder)
    return {axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in drawn[0].axes}


def test_evaluations_and_rates_are_drawn_as_they_are_and_means_have_no_bias(tmp_path, monkeypatch):
    rows = [{"step": step, "loss": 1.0, "grad_norm": 0.1, "lr": 0.1 * step} for step in range(1, 4)]
    rows[1] |= {"eval/loss": 3.5}
    rows[2] |= {"eval/loss": 0.049, "loss": 0.0}
    found = curves(tmp_path, rows, monkeypatch)
    assert found["held-out loss"] == [[3.5, 0.049]] and found["learning rate"] == [[row["lr"] for row in rows]]
    weights = [0.15 * 0.85**age for age in range(3)]
    assert found["loss of a step"][1] == pytest.approx([1, 1, sum(weights[1:]) / sum(weights)])


def test_the_curves_of_a_run_with_a_teacher_have_its_kl(tmp_path, monkeypatch):
    """It is in the place of the reward if that is 0."""
    alone = [{"step": step, "reward": 0.0, "teacher_kl": 0.5} for step in range(1, 3)]
    found = curves(tmp_path, alone, monkeypatch)
    assert found["KL to the teacher"][0] == [0.5, 0.5] and "mean reward of a step" not in found
    found = curves(tmp_path, [row | {"reward": 0.5} for row in alone], monkeypatch)
    assert {"KL to the teacher", "mean reward of a step"} < found.keys()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    """Its name is that of a folder, or the logs hold what no page can show."""
    group = {"step": 1, "images": [], "completions": [{"text": "a", "reward": 1, "advantage": 0, "parts": 3}]}
    for name, row in {"metrics": {"step": 1, "reward": 1}, "completions": group}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "index.html").mkdir()
    log = RunLog(str(tmp_path), {"report_every": 1}, resumed_step=1)
    for step in (2, 3):
        log.metrics(step, {"reward": 1.0})
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"^warning: .*: (\w+) fails \(", line)[1] for line in lines] == ["write_page", "write_index"]
    assert (tmp_path / "curves.png").is_file()
    with pytest.raises(UserError, match="write_page fails"):
        __main__.main(__main__.Config(run=str(tmp_path)))


def test_a_page_that_does_not_fit_on_the_disk_asks_for_space(tmp_path):
    def write_full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    (problem,) = report.write_pages(tmp_path, write_full)
    assert problem.endswith("No space left on device): free some space, or remove what is in its way")


@pytest.mark.parametrize("number", ["1e400", "1" * 400, "1.7e308", "-1.7e308"])
def test_huge_numbers_in_logs_keep_no_run_from_being_resumed_or_drawn(number, tmp_path):
    completion = {"text": "a", "reward": 1, "advantage": 7}
    for name, row in {"metrics": {"reward": 7}, "completions": {"images": [], "completions": [completion]}}.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"step": 1} | row) + "\n").replace("7", number) * 9)
    assert not report.write_pages(tmp_path)
    RunLog(str(tmp_path), {"report_every": 1}, resumed_step=2)


@pytest.mark.parametrize("rewards", [[1.0], {"vqa": "high"}, 3])
def test_a_group_with_damaged_rewards_is_not_shown(rewards):
    completion = {"text": "a", "reward": 1.0, "advantage": 0.5, "rewards": {"vqa": 1.0, "brevity": None}}
    row = {"step": 1, "images": [], "completions": [completion]}
    assert is_group(row) and not is_group(row | {"completions": [completion | {"rewards": rewards}]})
