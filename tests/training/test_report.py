"""The page of sampled completions."""

import json
import re

from training.report import GROUPS_ON_PAGE, write_page


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
    assert "step 7, a.jsonl row 3" in page and '<img alt="" src="data:,">' in page


def test_the_page_has_the_newest_groups_and_names_damaged_lines_by_their_numbers(tmp_path, capsys):
    row = {"source": "a.jsonl row 3", "question": "3?", "answer": "3", "images": [], "completions": []}
    lines = [json.dumps(row | {"step": step}) for step in range(1, GROUPS_ON_PAGE + 5)]
    lines[0], lines[-2] = "damaged, but too old to be read", "damaged"
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + "\n")
    write_page(tmp_path)
    steps = re.findall(r"step (\d+), a.jsonl", (tmp_path / "completions.html").read_text())
    assert [int(step) for step in steps] == [
        step for step in range(GROUPS_ON_PAGE + 4, 4, -1) if step != len(lines) - 1
    ]
    assert f"skipped the damaged line {len(lines) - 1} (1 in total)" in capsys.readouterr().err
