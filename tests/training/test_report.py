"""The page of sampled completions, the page of a run, and its last lines."""

import json
import re

import pytest
import torch
from PIL import Image

from common.files import read_jsonl
from common.records import Prompt, Rewards, Rollout, ScoredGroup
from config import Config
from tests.helpers.rows import make_sample
from training.loop import closing_lines
from training.report import GROUPS_ON_PAGE, is_group, write_index, write_page
from training.run_log import GROUPS_PER_REPORT, RunLog


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
    (run / "eval").mkdir(parents=True)
    for name in ("curves.png", "config.json", "eval/scores.json", "eval/scores.png"):
        (run / name).touch()
    rows = [{"step": step, "reward": 0.0, "frac_reward_zero_std": 1.0} for step in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_index(run)
    page = (run / "index.html").read_text()
    assert "<h1>Run a &amp; b</h1>" in page and page.count("warning: no group&#39;s rewards") == 1
    assert re.findall(r'href="([^"]+)"', page) == ["metrics.jsonl", "config.json", "eval"]
    assert re.findall(r'src="([^"]+)"', page) == ["curves.png", "eval/scores.png"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"eval_data": "b", "max_steps": 9},
            [
                "model     'my run/final'",
                "metrics   'my run'/metrics.jsonl",
                "page      'my run'/index.html, with its pictures",
                "evaluate  ./run.sh eval 'my run'",
                "resume    the same command, with --resume --max_steps HIGHER",
                "serve     vllm serve 'my run/final'",
            ],
        ),
        (
            {"lora_rank": 8, "report_every": 0, "model": "base"},
            [
                "model     'my run/final'",
                "metrics   'my run'/metrics.jsonl",
                "evaluate  ./run.sh eval 'my run' --data FILE",
                "resume    the same command, with --resume --epochs HIGHER",
                "merge     python merge_lora.py --base_model base "
                "--lora_model 'my run/final' --output_path 'my run'/merged",
                "serve     vllm serve 'my run'/merged",
            ],
        ),
    ],
)
def test_the_last_lines_say_how_to_go_on(flags, expected):
    assert closing_lines(Config(data="a", output="my run", **flags)).splitlines() == expected


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


def test_a_row_that_comes_again_is_logged_first_and_its_steps_are_side_by_side(tmp_path):
    log_steps(RunLog(str(tmp_path), {}, every=1), {1: "abcd", 2: "efgb", 3: "dhia"})
    log_steps(RunLog(str(tmp_path), {}, every=1, resumed_step=2), {3: "xyzc"})
    rows = read_jsonl(tmp_path / "completions.jsonl", is_group)
    assert "".join(row["source"] for row in rows) == "abc" + "bef" + "cxy" and GROUPS_PER_REPORT == 3
    articles = (tmp_path / "completions.html").read_text().split("<article>")[1:]
    shown = [re.findall(r"(\w) at step (\d)", article) for article in articles]
    assert shown == [[("y", "3")], [("x", "3")], [("c", "3"), ("c", "1")], [("f", "2")], [("e", "2")],
                     [("b", "2"), ("b", "1")], [("a", "1")]]  # fmt: skip


def test_pictures_are_numbered_in_their_places_and_a_sum_of_rewards_has_its_parts(tmp_path):
    log_steps(RunLog(str(tmp_path), {}, every=1), {1: "a"})
    page = (tmp_path / "completions.html").read_text()
    text = re.sub(r' src="[^"]*"', "", page).replace("\n", " ")
    first, second = (f'picture {number}<img alt="picture {number}">' for number in (1, 2))
    assert f"<b>Is</b> {first}<b>or</b> {second}<b>larger?</b>" in text
    assert "<small>vqa 1.00, brevity -0.50</small>" in text


@pytest.mark.parametrize("rewards", [[1.0], {"vqa": "high"}, 3])
def test_a_group_with_damaged_rewards_is_not_shown(rewards):
    completion = {"text": "a", "reward": 1.0, "advantage": 0.5, "rewards": {"vqa": 1.0, "brevity": None}}
    row = {"step": 1, "images": [], "completions": [completion]}
    assert is_group(row) and not is_group(row | {"completions": [completion | {"rewards": rewards}]})
