"""Build the default model and data: a tiny Qwen2.5-VL and generated images. GRPO then runs anywhere, without downloads.

    python -m apps.demo.tiny --task count      # drawings of 1 to 6 shapes; the answer is "A photo of 3 circles"
    python -m apps.demo.tiny --task digits     # scans of handwritten digits: which digit is it? is it even?

The model is a real `Qwen2_5_VLForConditionalGeneration` with 0.9 M parameters, in Hugging Face layout. Its byte-level
tokenizer has Qwen's special tokens and chat template. A short supervised warm start teaches the model the reply format
and how to recognise what an image shows, but about a third of the labels are wrong. The GRPO reward uses the correct
answers, so GRPO can undo these errors.

Writes OUTPUT/model, OUTPUT/train and OUTPUT/test. A folder that was already built with the same settings is kept.
"""

from __future__ import annotations

import csv
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common import cli, console
from common.errors import RunStopped, UserError, require
from common.files import partial_path
from common.records import Sample
from data import load_samples

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = 2  # increase this when the model or the data changes, so that existing folders are built again
LINE_EVERY = 30  # seconds between lines that say that the warm start is alive
STAMP = "tiny.json"  # the file in a folder that says with which settings it was built


@dataclass
class Config:
    """Build and warm-start a tiny vision-language model, and write its data."""

    task: Literal["count", "digits"] = "count"
    """"count": drawings of shapes. "digits": scanned handwritten digits."""
    family: Literal["qwen2_5_vl", "qwen3_5"] = "qwen2_5_vl"
    """Family of the model."""
    output: str | None = None
    """Folder to write. Default: runs/tiny/TASK-SEED, with the family's name at its end unless that is qwen2_5_vl."""
    seed: int = 0
    """Seed for the images, the weights and the batches."""
    steps: int | None = None
    """Number of warm-start steps, each with a batch of 48 images. Default: 160, or 320 for qwen3_5, which learns more
    slowly."""

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed must not be negative")


# --- model and tokenizer ----------------------------------------------------------------------------------------------

SPECIAL = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, followed by Qwen's special tokens: 264 tokens in all."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return with_special_tokens(tokenizer, CHAT_TEMPLATE)


def with_special_tokens(tokenizer: Tokenizer, chat_template: str) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level `tokenizer` for transformers, with Qwen's special tokens after its own."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )


def build_model(
    tokenizer: transformers.PreTrainedTokenizerFast, seed: int, family: str = "qwen2_5_vl", patch_size: int = 14
) -> transformers.PreTrainedModel:
    """Build a model with 4 decoder layers of width 128, 2 vision blocks of width 64, and random weights.

    `family`: qwen2_5_vl or qwen3_5, in which three of the four decoder layers are linear attention.
    `patch_size`: side of the patches of an image, in pixels.
    """
    token = tokenizer.convert_tokens_to_ids
    text = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        initializer_range=0.08,  # about 1/sqrt(width); with the usual 0.02, learning to count takes three times as long
        bos_token_id=token("<|endoftext|>"),
        eos_token_id=token("<|im_end|>"),
        tie_word_embeddings=True,
    )
    vision: dict[str, Any] = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=128, initializer_range=0.08
    )
    vision |= dict(patch_size=patch_size)
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if family == "qwen3_5":
        rotation |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
        text |= dict(head_dim=32, layer_types=["linear_attention"] * 3 + ["full_attention"])
        text |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
        vision |= dict(num_position_embeddings=36)
        config_class = transformers.Qwen3_5Config
    else:
        vision |= dict(fullatt_block_indexes=[1])
        config_class = transformers.Qwen2_5_VLConfig
    config = config_class(
        text_config=text | {"rope_parameters": rotation},
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):  # by default, most heads would forget a token before the next one
            layer.linear_attn.A_log.data = torch.linspace(0.003, 0.3, layer.linear_attn.num_v_heads).log()
    model.generation_config.eos_token_id = token("<|im_end|>")
    model.generation_config.pad_token_id = token("<|endoftext|>")
    return model


def save(model: transformers.PreTrainedModel, tokenizer: Any, folder: pathlib.Path, has_weights: bool = True) -> None:
    """Save weights, unless the model is without, configs, tokenizer, chat template and image processor in Hugging Face
    layout.
    """
    if has_weights:
        model.save_pretrained(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    patch_size = model.config.vision_config.patch_size
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=1280 * 28 * 28, patch_size=patch_size)
    images.save_pretrained(folder)
    # vLLM always builds a video processor as well. Saving one needs torchvision, so only its settings are written.
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    settings["video_processor_type"] = "Qwen2VLVideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings, indent=1) + "\n")


# --- data -------------------------------------------------------------------------------------------------------------

SHAPES = ("circle", "square", "triangle")
MAX_SHAPES = 6  # per image
SIZE = 84  # image side in pixels; gives nine image tokens


def draw_shapes(count: int, kind: str, rng: np.random.Generator) -> Image.Image:
    """Draw `count` shapes of one kind on a pale background, each in its own cell of a 3x3 grid, so none overlap."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.integers(200, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    cell = SIZE // 3
    for index in rng.permutation(9)[:count].tolist():
        r = rng.uniform(7, 11)
        x, y = cell * (index % 3 + 0.5) + rng.uniform(-2, 2), cell * (index // 3 + 0.5) + rng.uniform(-2, 2)
        colour = tuple(rng.integers(0, 150, 3).tolist())
        if kind == "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif kind == "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    return image


def write_shapes(folder: pathlib.Path, number: int, seed: list[int]) -> None:
    """Write a counting data set: main.csv next to images/, a format that `inputs/rows.py` reads."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = [("images_path", "question", "answer")]
    for i in range(number):
        count, kind = int(rng.integers(1, MAX_SHAPES + 1)), SHAPES[rng.integers(len(SHAPES))]
        name = f"images/{i:05d}.png"
        draw_shapes(count, kind, rng).save(folder / name)
        plural = kind if count == 1 else kind + "s"
        rows.append((name, "How many shapes?", f"A photo of {count} {plural}"))
    with (folder / "main.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def read_scans() -> np.ndarray:
    """Return 1,797 scans of handwritten digits, (1797, 65): 8 x 8 pixels with values from 0 to 16, and the digit.

    They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine
    Learning Repository, CC BY 4.0).
    """
    return np.loadtxt(pathlib.Path(__file__).parent / "digits.csv.gz", delimiter=",")


def write_digits(folder: pathlib.Path, indices: np.ndarray) -> None:
    """Write scanned digits as PNG files, and an EasyR1 JSONL that asks which digit each one shows and if it is even."""
    scans = read_scans()
    (folder / "images").mkdir(parents=True)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for i in indices.tolist():
            name, digit, pixels = f"images/{i:04d}.png", int(scans[i, -1]), scans[i, :-1].reshape(8, 8)
            Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(folder / name)
            even = "yes" if digit % 2 == 0 else "no"
            for question, answer in (("Which digit is this?", str(digit)), ("Is this digit even?", even)):
                row = {"prompt": f"<image>{question}", "answer": answer, "images": [name], "digit": digit}
                file.write(json.dumps(row) + "\n")


CONFUSED_WITH = {1: 7, 6: 5, 8: 3, 9: 4, 0: 6}  # digit: wrong label; other digits are always labelled correctly
FLIP_RATE = 0.7  # probability of a wrong label, if one is possible


def noisy_label(task: str, sample: Sample, flip: bool) -> str:
    """Return the reply to train on. The format is always right.

    With `flip`, a count above three is reduced by one, and a digit in `CONFUSED_WITH` is replaced with its wrong label.
    """
    if task == "count":
        *_, number, kind = sample.answer.split()  # "A photo of 5 circles"
        count = int(number)
        return f"A photo of {count - 1 if flip and count > 3 else count} {kind}"
    digit = sample.fields["digit"]
    label = CONFUSED_WITH.get(digit, digit) if flip else digit
    even = "yes" if label % 2 == 0 else "no"
    answer = str(label) if sample.answer == str(digit) else even
    return f"<think>It looks like a {label}.</think>\n<answer>{answer}</answer>"


# --- warm start -------------------------------------------------------------------------------------------------------


def last_line(log: TextIO) -> str:
    """Return the last line of a file that another process writes."""
    log.seek(0)
    return ["starting", *log.read().splitlines()][-1]


def warm_start(cfg: Config, folder: pathlib.Path) -> None:
    """Fine-tune the model in `folder` on its rows, with noisy labels in place of their answers, with sft.py.

    The learning rate decays to zero, so that the model learns how often labels are wrong. To a question with noisy
    labels, it then gives the correct answer with a probability of about 1 - `FLIP_RATE`.
    """
    task, data = ("count", "train") if cfg.task == "count" else ("vqa", "train/data.jsonl")
    samples, rng = load_samples(str(folder / data), task), np.random.default_rng([cfg.seed, 99])
    with (folder / "noisy.jsonl").open("w", encoding="utf-8") as file:
        for sample, flip in zip(samples, rng.random(len(samples)) < FLIP_RATE):
            images = [str(image.resolve()) for image in sample.images]
            row = {"prompt": sample.prompt, "answer": noisy_label(cfg.task, sample, flip), "images": images}
            file.write(json.dumps(row) + "\n")
    fine_tune(folder, folder / "noisy.jsonl", task=task, seed=cfg.seed, max_steps=cfg.steps)


def fine_tune(folder: pathlib.Path, rows: pathlib.Path, **flags: Any) -> None:
    """Fine-tune the model in `folder` on the file `rows`, which is then deleted, with sft.py and further `flags`."""
    settings = dict(model=folder / "model", data=rows, output=folder / "sft", prompts_per_step=48)
    settings |= dict(max_completion_length=64, learning_rate=2e-3, lr_schedule="linear", warmup=20, weight_decay=0.01)
    settings |= dict(save_every=0, report_every=0) | flags
    command = [sys.executable, "sft.py", "--train_vision", *(f"--{name}={value}" for name, value in settings.items())]
    with (folder / "warm_start.txt").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        while process.poll() is None:
            try:
                process.wait(LINE_EVERY)
            except subprocess.TimeoutExpired:
                console.log(f"warm start: {last_line(log)}")
        if process.returncode:
            raise RunStopped(f"the warm start ended with status {process.returncode}: {last_line(log)}", 1)
    (folder / "sft" / "final" / "model.safetensors").replace(folder / "model" / "model.safetensors")
    shutil.rmtree(folder / "sft")
    rows.unlink()
    (folder / "warm_start.txt").unlink()


def build_once(folder: pathlib.Path, made_from: dict[str, Any], build: Callable[[pathlib.Path], None]) -> None:
    """Call `build` with FOLDER.partial, which is renamed at the end, so that `folder` is never incomplete.

    A folder that was built already from the settings `made_from` is kept.
    """
    stamp = folder / STAMP
    if stamp.is_file() and json.loads(stamp.read_text())["made_from"] == made_from:
        print(f"{folder}: already exists")
        return
    if folder.exists() and not stamp.is_file() and any(folder.iterdir()):
        raise UserError(f"{folder} holds other files: choose another --output")
    partial = partial_path(folder)
    shutil.rmtree(partial, ignore_errors=True)
    build(partial)
    (partial / STAMP).write_text(json.dumps({"made_from": made_from}) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def build(cfg: Config, folder: pathlib.Path) -> None:
    """Write the data and the warm-started model to `folder`."""
    if cfg.task == "count":
        write_shapes(folder / "train", 4096, [cfg.seed, 0])
        write_shapes(folder / "test", 256, [cfg.seed, 1])
    else:
        order = np.random.default_rng(cfg.seed).permutation(1797)  # no scan is in both folders
        write_digits(folder / "train", order[:1397])
        write_digits(folder / "test", order[1397:])
    tokenizer = byte_tokenizer()
    model = build_model(tokenizer, cfg.seed, cfg.family)
    save(model, tokenizer, folder / "model")
    warm_start(cfg, folder)
    print(f"built a model with {model.num_parameters() / 1e6:.1f} M parameters and its data")


def main(cfg: Config) -> None:
    cfg.steps = cfg.steps or (320 if cfg.family == "qwen3_5" else 160)
    suffix = "" if cfg.family == "qwen2_5_vl" else f"-{cfg.family}"
    folder = pathlib.Path(cfg.output or f"runs/tiny/{cfg.task}-{cfg.seed}{suffix}")
    made_from = {"version": VERSION, "task": cfg.task, "seed": cfg.seed, "steps": cfg.steps, "family": cfg.family}
    build_once(folder, made_from, lambda partial: build(cfg, partial))


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
