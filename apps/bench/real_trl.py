"""Train Gemma 3 270M on sums with TRL's GRPOTrainer; `apps/bench/real.py` runs it beside this project.

    pip install trl==1.16.0
    python apps/bench/real_trl.py runs/real/data --output trl.json --steps 100 --seed 0

The model, prompts, reward, sampling and held-out rows are those of recipes/real.flags, and so are the loss and AdamW's
settings. Writes the held-out scores and the seconds of each step, without the evaluations, as JSON.
"""

import json
import os
import pathlib
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
import transformers
import tyro
from datasets import Dataset

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"TRL cannot be imported here ({error}): see docs/real.md")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT))
from recipes.sums import starts_with_the_sum

TOKENS = 8  # in a completion
ROWS_TOGETHER = 256  # in a batch of the evaluation


@dataclass
class Config:
    """Train on sums with TRL."""

    data: tyro.conf.Positional[str]
    """Folder with model/, train.jsonl and test.jsonl, which `./run.sh real` makes."""
    output: str
    """JSON file for the scores and the times."""
    steps: int = 100
    """Number of steps, of 64 prompts with 8 completions each."""
    learning_rate: float = 5e-6
    """AdamW's learning rate, which is constant."""
    eval_every: int = 20
    """Number of steps between evaluations; there is also one before the first step."""
    seed: int = 0
    """Seed of the order of the rows and of the sampling."""
    use_vllm: bool = True
    """Sample with vLLM; otherwise with transformers, which also works without a GPU."""


def read_prompts(file: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of `file` with the prompts of recipes/sums.jinja."""
    template = (ROOT / "recipes" / "sums.jinja").read_text().removesuffix("\n")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    filled = [template.replace("{{ content }}", row["prompt"]) for row in rows]
    return [{"prompt": "<bos>" + text, "answer": row["answer"]} for text, row in zip(filled, rows)]


class Scores(transformers.TrainerCallback):
    """Score the model on the held-out rows, greedily, and time the steps between the evaluations."""

    def __init__(self, cfg: Config, tokenizer: transformers.PreTrainedTokenizerBase):
        self.cfg, self.tokenizer = cfg, tokenizer
        self.rows = read_prompts(pathlib.Path(cfg.data) / "test.jsonl")
        self.curve: list[tuple[int, float]] = []
        self.seconds: list[float] = []

    def score(self, model: torch.nn.Module, step: int) -> None:
        """Record the fraction of held-out sums that are right after `step` steps."""
        model.eval()
        self.tokenizer.padding_side = "left"
        right = 0.0
        for first in range(0, len(self.rows), ROWS_TOGETHER):
            rows = self.rows[first : first + ROWS_TOGETHER]
            prompts = [row["prompt"] for row in rows]
            batch = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
            batch = batch.to(model.device)
            with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
                ids = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
            texts = self.tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
            right += sum(starts_with_the_sum(text, row["answer"]) for text, row in zip(texts, rows))
        model.train()
        self.curve.append((step, right / len(self.rows)))
        print(f"step {step}: {self.curve[-1][1]:.3f} of the held-out sums", flush=True)

    def on_train_begin(self, args, state, control, model, **_) -> None:
        self.score(model, 0)
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, model, **_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        if state.global_step % self.cfg.eval_every == 0 or state.global_step == self.cfg.steps:
            self.score(model, state.global_step)
        self.started = time.perf_counter()


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Score a step's completions."""
    return [starts_with_the_sum(text, gold) for text, gold in zip(completions, answer)]


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = None  # the prompts are plain texts
    on_gpu = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=f"{cfg.output}-files",
        learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=cfg.steps,
        per_device_train_batch_size=512 if on_gpu else 16,
        num_generations=8,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        use_vllm=cfg.use_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=256,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        seed=cfg.seed,
    )
    scores = Scores(cfg, tokenizer)
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(read_prompts(folder / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[scores],
    )
    trainer.train()
    pathlib.Path(cfg.output).write_text(json.dumps({"curve": scores.curve, "seconds": scores.seconds}))


if __name__ == "__main__":
    main(tyro.cli(Config))
