"""Train a model of real weights with TRL's GRPOTrainer; `apps/bench/real.py` runs it beside this project.

    pip install trl==1.16.0
    python apps/bench/real_trl.py runs/real/data --output trl.json --steps 100 --seed 0
    python apps/bench/real_trl.py runs/vlm/data --recipe vlm --model runs/vlm/sft-0/final --output trl.json

The model, prompts, pictures, reward, sampling and held-out rows are those of the recipe, recipes/real.flags or
recipes/vlm.flags, and so are the loss and AdamW's settings. A vision tower is frozen, as there. Writes the held-out
scores, the seconds of each step, without the evaluations, and the GPU memory in use, as JSON.
"""

import importlib
import json
import os
import pathlib
import shlex
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
import transformers
import tyro
from datasets import Dataset
from jinja2 import Template

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"TRL cannot be imported here ({error}): see docs/real.md")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT))
from common.templates import read_template
from inputs.images import fit_image, fitted_size
from rewards import TASKS

ROWS_TOGETHER = 256  # in a batch of the evaluation
MOST_PIXELS = 1003520  # of a picture, as grpo.py has it
Recipe = Literal["real", "vlm"]
ROWS = {"real": ("train.jsonl", "test.jsonl"), "vlm": ("prices-train.jsonl", "prices-some.jsonl")}
TOGETHER = {"real": 512, "vlm": 128}  # completions in a forward pass; 512 with pictures are 97,000 tokens
LENGTH = {"real": 256, "vlm": 512}  # of a prompt and a completion together, at most, in tokens


@dataclass
class Config:
    """Train with TRL."""

    data: tyro.conf.Positional[str]
    """Folder with the rows, which `./run.sh real` or `./run.sh vlm` makes."""
    output: str
    """JSON file for the scores and the times."""
    recipe: Recipe = "real"
    """Whose flags and rows."""
    model: str | None = None
    """Folder of the model; by default, the one beside the rows."""
    steps: int = 100
    """Number of steps, of as many prompts and completions as the recipe has."""
    learning_rate: float | None = None
    """AdamW's learning rate, which is constant; by default, the recipe's."""
    eval_every: int = 20
    """Number of steps between evaluations; there is also one before the first step."""
    seed: int = 0
    """Seed of the order of the rows and of the sampling."""
    use_vllm: bool = True
    """Sample with vLLM; otherwise with transformers, which also works without a GPU."""


def read_flags(recipe: Recipe) -> dict[str, list[str]]:
    """Return the values of each flag of a recipe."""
    flags: dict[str, list[str]] = {}
    for word in shlex.split((ROOT / "recipes" / f"{recipe}.flags").read_text(), comments=True):
        if word.startswith("--"):
            values = flags.setdefault(word.removeprefix("--"), [])
        else:
            values.append(word)
    return flags


def load_task(flags: dict[str, list[str]]) -> tuple[Callable[..., float], Template]:
    """Return the reward that is trained on, and the template of the prompts.

    The reward is that of the recipe's plugin, or the one in `--reward` without a weight of its own.
    """
    if "plugin" in flags:
        load(flags["plugin"][0])
        task = TASKS[flags["task"][0]]
        return task.reward, Template(task.template)
    (place,) = (reward for reward in flags["reward"] if "=" not in reward)
    file, _, name = place.partition(":")
    return getattr(load(file), name), read_template(str(ROOT / flags["template"][0]), "--template", ["content"])


def load(file: str) -> types.ModuleType:
    """Return the module in `file`, of the project's folder."""
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def read_rows(file: pathlib.Path, template: Template, flags: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the rows of `file`, with the template around the question and pictures of the recipe's size."""
    least = int(flags["min_pixels"][0]) if "min_pixels" in flags else 0

    def fit(height: int, width: int) -> tuple[int, int]:
        """Return the size of a picture in the recipe, which TRL's processor leaves as it is."""
        return fitted_size(height, width, least, MOST_PIXELS)

    rows = []
    for row in map(json.loads, file.read_text().splitlines()):
        text = template.render(content=row["prompt"].removeprefix("<image>"))
        if "images" not in row:
            rows.append({"prompt": "<bos>" + text, "answer": row["answer"]})
            continue
        content = [{"type": "image"}, {"type": "text", "text": text}]
        images = [fit_image(file.parent / image, fit) for image in row["images"]]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": images, "answer": row["answer"]})
    return rows


class Scores(transformers.TrainerCallback):
    """Score the model on the held-out rows, greedily, and time the steps between the evaluations."""

    def __init__(self, args: GRPOConfig, processor: Any, rows: list[dict[str, Any]], reward: Callable[..., float]):
        self.args, self.processor, self.rows, self.reward = args, processor, rows, reward
        self.curve: list[tuple[int, float]] = []
        self.seconds: list[float] = []
        self.gib = 0.0

    def encode(self, rows: list[dict[str, Any]]) -> transformers.BatchFeature:
        """Return the inputs of `rows`, padded on the left."""
        options: dict[str, Any] = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        if "images" not in rows[0]:
            return self.processor([row["prompt"] for row in rows], add_special_tokens=False, **options)
        chat = self.processor.apply_chat_template
        texts = [chat(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
        return self.processor(text=texts, images=[row["images"] for row in rows], **options)

    def score(self, model: torch.nn.Module, step: int) -> None:
        """Record the fraction of held-out rows that are right after `step` steps."""
        model.eval()
        right = 0.0
        for first in range(0, len(self.rows), ROWS_TOGETHER):
            rows = self.rows[first : first + ROWS_TOGETHER]
            batch = self.encode(rows).to(model.device)
            with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
                ids = model.generate(**batch, max_new_tokens=self.args.max_completion_length, do_sample=False)
            texts = self.processor.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(self.reward(text, row["answer"]) for text, row in zip(texts, rows))
        model.train()
        self.curve.append((step, right / len(self.rows)))
        print(f"step {step}: {self.curve[-1][1]:.3f} of the held-out rows", flush=True)

    def on_train_begin(self, args, state, control, model, **_) -> None:
        self.score(model, 0)
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, model, **_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.gib = max(self.gib, (total - free) / 2**30)
        self.seconds.append(time.perf_counter() - self.started)
        if state.global_step % self.args.eval_steps == 0 or state.global_step == self.args.max_steps:
            self.score(model, state.global_step)
        self.started = time.perf_counter()


def load_model(cfg: Config, folder: str) -> tuple[torch.nn.Module | str, Any]:
    """Return the model, or its folder, and what encodes its prompts."""
    if cfg.recipe == "real":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = None  # the prompts are plain texts
        return folder, tokenizer
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    return model, transformers.AutoProcessor.from_pretrained(folder)


def main(cfg: Config) -> None:
    folder, flags = pathlib.Path(cfg.data), read_flags(cfg.recipe)
    reward, template = load_task(flags)
    train_rows, held_out = (read_rows(folder / file, template, flags) for file in ROWS[cfg.recipe])
    model, processor = load_model(cfg, cfg.model or str(folder / "model"))

    def rewards(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        """Score a step's completions, each a text or a list with one turn."""
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [reward(text, gold) for text, gold in zip(texts, answer)]

    on_gpu = torch.cuda.is_available()
    generations = int(flags["num_generations"][0])
    together = min(TOGETHER[cfg.recipe], int(flags["prompts_per_step"][0]) * generations)
    args = GRPOConfig(
        output_dir=f"{cfg.output}-files",
        learning_rate=cfg.learning_rate or float(flags["learning_rate"][0]),
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=cfg.steps,
        per_device_train_batch_size=together if on_gpu else 16,
        gradient_accumulation_steps=int(flags["prompts_per_step"][0]) * generations // together if on_gpu else 1,
        num_generations=generations,
        max_completion_length=int(flags["max_completion_length"][0]),
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"} if isinstance(model, str) else None,
        use_vllm=cfg.use_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=LENGTH[cfg.recipe],
        logging_steps=10,
        eval_steps=cfg.eval_every,
        save_strategy="no",
        report_to=[],
        seed=cfg.seed,
    )
    scores = Scores(args, processor, held_out, reward)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list(train_rows),
        processing_class=processor,
        callbacks=[scores],
    )
    trainer.train()
    result = {"curve": scores.curve, "seconds": scores.seconds, "gib": scores.gib}
    pathlib.Path(cfg.output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Config))
