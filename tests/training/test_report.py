"""The page of sampled completions."""

import json

from training.report import write_page


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
