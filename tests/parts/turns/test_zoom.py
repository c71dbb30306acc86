"""The demo with a tool: its pictures, its warm start, and a short run of `./run.sh zoom`'s commands.

Guards against: a warm start that says where to look, prompts of the warm start that differ from those in training, and
a digit that its cell does not hold.
"""

import re
import shlex

import numpy as np
import pytest
import torch

pytest.importorskip("apps", reason="needs apps/, which is not here")
pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")

from apps.demo import tiny, zoom
from common.files import read_jsonl
from common.records import Prompt, Trajectory
from data import encode_prompt, encode_response, load_processor, load_samples
from parts.turns import use_environment
from tests.helpers.marks import needs
from tests.helpers.samplers import begin_episode, take_turn
from tests.helpers.scripts import ROOT, run_script

pytestmark = pytest.mark.usefixtures("environments")
SEEN = dict(min_pixels=zoom.SEEN**2, max_pixels=zoom.SEEN**2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a folder with pictures, and their rows."""
    folder = tmp_path_factory.mktemp("zoom")
    scans = tiny.read_scans()[:24]
    return folder, zoom.write_pictures(folder, scans, 24, np.random.default_rng(0))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with the model and the data of the demo, after a warm start of two steps."""
    folder = tmp_path_factory.mktemp("built") / "zoom"
    zoom.main(zoom.Config(output=str(folder), seed=3, pictures=16, steps=2))
    return folder


def joined(prompt: Prompt, later: Trajectory) -> Prompt:
    """Return a prompt and what followed it as one prompt."""
    return Prompt(
        torch.cat([prompt.ids, later.ids]),
        prompt.engine_ids + later.engine_ids,
        torch.cat([prompt.position_ids, later.position_ids], dim=1),
        vision={name: torch.cat([values, later.vision[name]]) for name, values in prompt.vision.items()},
    )


def test_the_digit_lies_within_its_cell():
    scale, rng = zoom.SIZE // zoom.SEEN, np.random.default_rng(0)
    for i, scan in enumerate(tiny.read_scans()[:90]):
        x, y = (scale * corner for corner in zoom.CELLS[i % 9])
        picture = np.asarray(zoom.draw(scan[:-1], zoom.CELLS[i % 9], rng)).max(axis=2)
        side = scale * zoom.PART
        assert picture[y : y + side, x : x + side].max() > 200
        picture = picture.copy()
        picture[y : y + side, x : x + side] = 0
        assert picture.max() < 170, "nothing is bright elsewhere"


def test_the_pictures_follow_from_the_seed(rows, tmp_path):
    folder, first = rows
    again = zoom.write_pictures(tmp_path, tiny.read_scans()[:24], 24, np.random.default_rng(0))
    assert again == first
    for row in first:
        assert (folder / row["images"][0]).read_bytes() == (tmp_path / row["images"][0]).read_bytes()


def test_a_call_does_not_depend_on_where_the_digit_is(rows, tmp_path):
    """The same calls are made if every digit were elsewhere, and they are at all places."""

    def calls(name: str, cells: list[tuple[int, int]]) -> list[str]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "images").symlink_to(rows[0] / "images")
        moved = [row | {"cell": cell} for row, cell in zip(rows[1] * 16, cells)]
        chats = [*zoom.warm_start_rows(folder, moved, np.random.default_rng(0))]
        return [chat["messages"][-1]["content"] for chat in chats if "tool_call" in chat["messages"][-1]["content"]]

    cells = [zoom.CELLS[i % 9] for i in range(384)]
    assert calls("here", cells) == (made := calls("there", cells[1:] + cells[:1]))
    assert {made.count(zoom.call(*cell)) > 0 for cell in zoom.CELLS} == {True}, "the mean is 10"
    assert len(made) == 96


def test_the_warm_start_reads_what_training_shows(rows, built, tmp_path):
    """Its chats have the token ids, positions and pixels of an episode with the same call."""
    folder, pictures = rows
    (tmp_path / "images").symlink_to(folder / "images")
    chats = [*zoom.warm_start_rows(tmp_path, pictures, np.random.default_rng(0))]
    zoom.write_rows(tmp_path / "chats.jsonl", chats)
    processor = load_processor(f"{built}/model", "vqa", "recipes/zoom.jinja", **SEEN)
    in_training = use_environment(processor, "zoom", max_turns=2, max_seen=48)
    samples = load_samples(str(folder / "data.jsonl"), "vqa", processor=in_training)
    by_name = {sample.images[0].name: i for i, sample in enumerate(samples)}
    number = 0
    for sample in load_samples(str(tmp_path / "chats.jsonl"), "vqa", processor=processor):
        expected, row = encode_prompt(sample, processor), by_name.get(sample.images[0].name)
        prompt = row is not None and encode_prompt(samples[row], in_training)
        if len(sample.images) == 2:
            episode = begin_episode(samples, in_training, row, prompt)
            assert take_turn(episode, encode_response(samples[row], sample.turns[1].text, in_training).tolist())
            prompt, number = joined(prompt, episode.rollout().trajectory), number + 1
        elif "tool_call" not in sample.answer:
            continue  # an answer without the tool, whose prompt does not name it
        assert prompt.engine_ids == expected.engine_ids
        for name in ("ids", "position_ids"):
            torch.testing.assert_close(getattr(prompt, name), getattr(expected, name))
        for name, values in expected.vision.items():
            torch.testing.assert_close(prompt.vision[name], values)
    assert number == len(pictures)


def test_a_call_is_ten_tokens(built):
    tokenizer = load_processor(f"{built}/model", "vqa", **SEEN).tokenizer
    lengths = {len(tokenizer(zoom.call(*cell), add_special_tokens=False).input_ids) for cell in zoom.CELLS}
    assert lengths == {9}, "and the end of the turn"


@needs("parts/plugins.py")
def test_the_demo_runs(built, tmp_path):
    """A model of few steps goes through GRPO with the tool, as recipes/zoom.sh does it."""
    recipe = (ROOT / "recipes" / "zoom.sh").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^show .venv/bin/python (grpo.py .*)$", recipe, re.MULTILINE)
    values = {"$tiny": str(built), "$run": str(tmp_path / "run"), "$seed": "3", '"${given_flags[@]}"': ""}
    for name, value in values.items():
        command = command.replace(name, value)
    small = ["--max_steps=1", "--prompts_per_step=2", "--eval_every=0", "--beta=0.01"]  # KL: equal rewards count too
    done = run_script(*shlex.split(command), *small)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1:]
    assert row["step"] == 1 and row["turns/mean"] >= 1
    assert row["sampling/logp_difference_turn_1"] < 1e-4
