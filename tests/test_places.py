"""The rewards of examples/places.py by hand, exploits among them, and as a run computes them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from common import plugins
from common.files import read_jsonl
from common.records import Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from tests.helpers.marks import needs
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT

pytestmark = needs("examples")
GOLD = [100, 100, 300, 200]  # 200 x 100 of 1000 x 1000
OTHER = [600, 600, 700, 800]
WHOLE = [0, 0, 1000, 1000]
HALF = [100, 100, 200, 200]  # of GOLD: IoU 0.5
SHIFTED = [200, 100, 400, 200]  # IoU 1/3
FAR = [600, 100, 800, 200]  # hull 700 x 100, union 40,000: GIoU −3/7
ONE, TWO, NONE = {"bbox": GOLD}, {"boxes": [GOLD, OTHER]}, {"boxes": []}
SEVERAL = f"{GOLD} or {OTHER}"
GRID = json.dumps([[x, y, x + 50, y + 50] for x in range(0, 1000, 50) for y in range(0, 1000, 50)])
CASES = [
    # one box
    ("box", str(GOLD), ONE, 1.0),
    ("box", json.dumps({"bbox_2d": GOLD, "label": "cat"}), ONE, 1.0),
    ("box", "<|begin_of_box|>[[100,100,300,200]]<|end_of_box|>", ONE, 1.0),
    ("box", "<ref>cat</ref><box>[[100, 100, 300, 200]]</box>", ONE, 1.0),
    ("box", "<|box_start|>(100,100),(300,200)<|box_end|>", ONE, 1.0),
    ("box", f"<think>{OTHER}</think>{GOLD}", ONE, 1.0),
    ("box", str(HALF), ONE, 0.5),
    ("box", str(SHIFTED), ONE, 1 / 3),
    ("box", str(FAR), ONE, 0.0),
    ("box", str(GOLD), {"gt_bbox": [GOLD]}, 1.0),
    ("box", "I see a cat.", ONE, 0.0),
    ("box", "", ONE, 0.0),
    ("box", str(WHOLE), ONE, 0.02),  # exploit: the whole picture
    ("box", SEVERAL, ONE, 0.0),  # exploit: several boxes
    ("box", f"{GOLD}{GOLD}", ONE, 0.0),
    ("box", GRID, ONE, 0.0),  # exploit: hundreds of boxes
    ("box", f"<think>{GOLD}", ONE, 0.0),  # exploit: only in the thinking
    ("box", '{"bbox_2d": [x1, y1, x2, y2]}', ONE, 0.0),  # exploit: the example of the prompt
    ("box", "[300, 200, 100, 100]", ONE, 0.0),  # edges on the wrong side
    ("box", "[100, 100, 1e999, 1e999]", ONE, 20_000 / (1e6 - 100) ** 2),  # exploit: without end
    ("box", "[100, 100, 100, 100]", ONE, 0.0),
    # at a threshold
    ("box_hit", str(HALF), ONE, 1.0),
    ("box_hit", str(SHIFTED), ONE, 0.0),
    ("box_hit", str(WHOLE), ONE, 0.0),
    ("box_hit", SEVERAL, ONE, 0.0),
    # generalised
    ("box_giou", str(GOLD), ONE, 1.0),
    ("box_giou", str(SHIFTED), ONE, 1 / 3),
    ("box_giou", str(FAR), ONE, -3 / 7),
    ("box_giou", "nothing", ONE, -1.0),
    ("box_giou", SEVERAL, ONE, -1.0),
    ("box_giou", str(WHOLE), ONE, 0.02),  # the exploit that its docstring names: above any miss
    # several boxes
    ("boxes", json.dumps([GOLD, OTHER]), TWO, 1.0),
    ("boxes", json.dumps([OTHER, GOLD]), TWO, 1.0),
    ("boxes", json.dumps([GOLD]), TWO, 2 / 3),
    ("boxes", json.dumps([HALF, OTHER]), TWO, 0.75),
    ("boxes", json.dumps([GOLD, GOLD]), TWO, 0.5),  # exploit: the same box several times
    ("boxes", json.dumps([GOLD, OTHER, WHOLE]), TWO, 0.8),
    ("boxes", json.dumps([WHOLE]), TWO, 2 * 0.02 / 3),
    ("boxes", GRID, TWO, 0.0),  # exploit: hundreds of boxes
    ("boxes", "[]", NONE, 1.0),
    ("boxes", "[]", TWO, 0.0),
    ("boxes", str(GOLD), NONE, 0.0),
    # a point in a box
    ("point", "[150, 150]", ONE, 1.0),
    ("point", '<points x1="300" y1="200" alt="cat">cat</points>', ONE, 1.0),  # on its corner
    ("point", "[301, 150]", ONE, 0.0),
    ("point", json.dumps({"point_2d": [650, 700]}), TWO, 1.0),
    ("point", str(GOLD), ONE, 1.0),  # its centre
    ("point", str(WHOLE), ONE, 0.0),  # exploit: the whole picture
    ("point", "[150, 150] [650, 650]", ONE, 0.0),  # exploit: several points
    ("point", f"[150, 150] or {GOLD}", ONE, 0.0),
]


@pytest.fixture(scope="module")
def places():
    import rewards

    before = set(rewards.TASKS)
    yield plugins.import_file(str(ROOT / "examples" / "places.py"))
    for name in set(rewards.TASKS) - before:
        del rewards.TASKS[name]


@pytest.mark.parametrize(("reward", "completion", "row", "value"), CASES, ids=range(len(CASES)))
def test_the_rewards_by_hand(reward, completion, row, value, places):
    fields = row | {"coordinates": "model", "question": "Where?", "level": 3}
    assert getattr(places, reward)(completion, "", **fields) == pytest.approx(value)


@pytest.mark.parametrize("reward", ["box", "boxes", "point"])
@pytest.mark.parametrize("row", [{}, {"bbox": GOLD}, {"bbox": GOLD, "coordinates": "file"}, {"bbox": "the red one"}])
def test_places_that_were_not_converted_are_refused(reward, row, places):
    with pytest.raises(ValueError, match="no boxes in the model's coordinates: see 'Boxes and points'"):
        getattr(places, reward)(str(GOLD), "", **row)
    with pytest.raises(ValueError, match="the row has 2 boxes: use --task boxes"):
        places.box(str(GOLD), "", coordinates="model", **TWO)


@needs("parts/workers.py")
def test_a_run_scores_what_a_completion_says(places):
    """The reward runs in its worker, and a completion that hits is correct in evaluation."""
    fields = {"bbox": GOLD, "coordinates": "model", "extent": [1000, 1000]}
    row = make_sample("<image>Where?", str(GOLD), [Image.new("RGB", (8, 8))], "rows.jsonl row 1", fields)
    texts = [str(GOLD), str(HALF), str(SHIFTED), SEVERAL, "<|begin_of_box|>[[100,100,300,200]]<|end_of_box|>"]
    rollouts = [Rollout(torch.arange(3), torch.zeros(3), text=text) for text in texts]
    flags = RewardFlags(reward=[f"{ROOT}/examples/places.py:box_giou=0"])
    ((found,), error) = Scorer("box", flags)([row], [rollouts])
    assert error is None and [each.total for each in found] == pytest.approx([1, 0.5, 1 / 3, 0, 1])
    assert [each.parts["box_giou"] for each in found] == pytest.approx([1, 0.5, 1 / 3, -1, 1])
    task = places.rewards.TASKS["box"]
    assert [task.verdict("exact_match", text, "", each.total) for text, each in zip(texts, found)] == [1, 1, 0, 0, 1]
    assert [task.verdict("format", text) for text in texts] == [1, 1, 1, 0, 1]


@pytest.mark.slow
@needs("apps")
@needs("parts/formats")
@needs("parts/workers.py")
def test_a_tiny_model_learns_to_point(tmp_path):
    """Rows are in pixels of files twice as large as what the model sees; half of the points in the SFT are wrong."""
    from apps.demo import tiny

    rng, side, cell = np.random.default_rng(0), 2 * tiny.SIZE, tiny.SIZE
    corners = [(0, 0), (cell, 0), (0, cell), (cell, cell)]
    rows: dict[str, list[dict]] = {"noisy": [], "train": [], "test": []}
    for i in range(2048 + 256):
        image = Image.new("RGB", (side, side), tuple(rng.integers(200, 256, 3).tolist()))
        x, y = corners[rng.integers(4)]
        image.paste(tuple(rng.integers(0, 120, 3).tolist()), (x, y, x + cell, y + cell))
        image.save(tmp_path / f"{i}.png")
        row = {"prompt": "<image>Where is the square?", "images": [f"{i}.png"], "coordinates": "file"}
        rows["train" if i < 2048 else "test"].append(row | {"bbox": [x, y, x + cell, y + cell]})
        left, top = (x, y) if rng.random() < 0.3 else corners[rng.integers(4)]
        rows["noisy"].append(row | {"point": [left + cell // 2, top + cell // 2]})
    for name, own in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    tokenizer = tiny.byte_tokenizer()
    tiny.save(tiny.build_model(tokenizer, 0), tokenizer, tmp_path / "start")
    shared = "--plugin examples/places.py --task point --max_pixels 7056 --max_completion_length 16 --report_every 0"

    def train(program: str, model: str, data: str, output: str, flags: str) -> None:
        files = f"--model {tmp_path}/{model} --data {tmp_path}/{data}.jsonl --output {tmp_path}/{output}"
        command = [sys.executable, program, *f"{files} {shared} {flags}".split()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900)

    warm = "--train_vision --max_steps 320 --prompts_per_step 48 --learning_rate 2e-3 --lr_schedule linear --warmup 20"
    train("sft.py", "start", "noisy", "sft", warm)
    learn = (
        f"--eval_data {tmp_path}/test.jsonl --eval_every 40 --max_steps 40 --prompts_per_step 16 --learning_rate 2e-4"
    )
    train("grpo.py", "sft/final", "train", "grpo", learn)
    steps = read_jsonl(tmp_path / "grpo" / "metrics.jsonl")
    sampled = [row["reward"] for row in steps if "reward" in row]
    held_out = [row["eval/reward"] for row in steps if "eval/reward" in row]
    print(f"sampled {sampled[0]:.3f} -> {np.mean(sampled[-5:]):.3f}, held out {held_out}")
    assert sampled[0] < 0.65 < 0.9 < np.mean(sampled[-5:])
    assert held_out[-1] > 0.9
