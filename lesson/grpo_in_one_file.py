"""GRPO for a vision-language model in one file: a tiny Qwen2.5-VL unlearns a mistake in counting.

    python -m apps.demo.tiny --task count        # once: writes the model and the drawings to runs/tiny/count-0
    python lesson/grpo_in_one_file.py            # learns from them; --help explains the settings

Read from the bottom: `train` is the algorithm, `step` one step of it, `grpo_loss` its formula. Comments give the line
numbers of Algorithm 1 of DeepSeekMath (arXiv:2402.03300). What the full code adds, and where:

    any row, prompt and model; bad rows are refused      inputs/rows.py, data.py, policy/families.py
    a prompt is computed once for its G completions      packing.py, policy/forward.py
    vLLM samples, with new weights in 0.2 s              rollout.py, policy/sharding.py
    rewards that are hard to cheat; other losses         rewards.py, grading/, grpo.py
    several GPUs, adapters, checkpoints, metrics         training/, policy/

Shapes: P prompts of S tokens, G completions of each, N = P · G completions of at most L tokens, V vocabulary.
"""

import argparse
import copy
import csv
import json
import pathlib
import re
import time
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor


@dataclass
class Settings:
    data: str = "runs/tiny/count-0"  # the folder that apps/demo/tiny.py has written
    output: str = "runs/lesson/plain.jsonl"  # one line of metrics per step
    seed: int = 0  # of the order of the rows and of sampling
    steps: int = 30  # of Algorithm 1: sample, score, update
    prompts: int = 16  # P, per step
    group: int = 8  # G, completions per prompt
    max_tokens: int = 64  # per completion
    learning_rate: float = 1e-4  # of AdamW, constant
    clip: float = 0.2  # ε: ratios outside 1 ± ε earn nothing more
    iterations: int = 1  # μ, updates per step
    beta: float = 0.0  # weight of the KL divergence from the initial model
    importance_cap: float = 2.0  # bound of the importance weight π_old / π_sampler; 0: no importance weight
    sync_every: int = 1  # steps between two syncs of the sampler with the policy
    advantage: Literal["group", "no_std", "no_mean"] = "group"  # no_std: not divided by σ; no_mean: the reward itself
    normaliser: Literal["sequence", "token", "sum"] = "sequence"  # the loss: a mean over sequences or tokens, or a sum
    picture: Literal["shown", "blank"] = "shown"  # blank: a grey picture in place of each drawing
    eval_every: int = 5  # steps between evaluations on the held-out drawings
    eval_rows: int = 256  # held-out drawings in an evaluation


@dataclass
class Task:
    """Rows, and what turns them into tokens."""

    folder: pathlib.Path
    rows: dict[str, list[dict[str, str]]]  # of "train" and "test"
    tokenizer: transformers.PreTrainedTokenizerBase
    images: transformers.BaseImageProcessor
    picture: str


def load_task(settings: Settings) -> Task:
    folder = pathlib.Path(settings.data)
    if not folder.is_dir():
        raise SystemExit(f"error: no {folder}: first run python -m apps.demo.tiny --task count")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "model")
    rows = {part: list(csv.DictReader((folder / part / "main.csv").open())) for part in ("train", "test")}
    return Task(folder, rows, tokenizer, images, settings.picture)


def load_model(data: str) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForImageTextToText.from_pretrained(pathlib.Path(data) / "model")
    model.model.visual.requires_grad_(False)  # it sees well enough
    return model


def encode(task: Task, part: str, rows: list[dict[str, str]]) -> dict[str, Tensor]:
    """Return the model's inputs for P prompts. All rows ask the same question, so no prompt is padded."""
    pictures = [Image.open(task.folder / part / row["images_path"]) for row in rows]
    if task.picture == "blank":
        pictures = [Image.new("RGB", picture.size, "grey") for picture in pictures]
    inputs = task.images(images=pictures, return_tensors="pt")  # pixel_values (patches, 1176), image_grid_thw (P, 3)
    system = "Count the objects. Reply: A photo of [NUMBER] [OBJECT_TYPE]"
    user = [{"type": "image"}, {"type": "text", "text": rows[0]["question"]}]
    chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text = task.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    image_tokens = int(inputs["image_grid_thw"][0].prod()) // 4  # four patches become one token
    text = text.replace("<|image_pad|>", "<|image_pad|>" * image_tokens)
    ids = torch.tensor([task.tokenizer(text).input_ids] * len(rows))  # (P, S)
    is_image = ids == task.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {"input_ids": ids, "mm_token_type_ids": is_image.long(), **inputs}


def count_reward(completion: str, answer: str) -> float:
    """Return 1 if the first number is the right one, and less the further away it is."""
    said, true = re.search(r"\d+", completion), re.search(r"\d+", answer)
    distance = abs(int(said[0]) - int(true[0])) if said else 99
    return (1.0, 0.85, 0.7, 0.4, 0.3, 0.2)[distance] if distance < 6 else 0.0


# --- the algorithm ----------------------------------------------------------------------------------------------------


@dataclass
class Completions:
    """N sampled completions. What follows a completion's end token is padding."""

    ids: Tensor  # (N, L)
    mask: Tensor  # (N, L), true up to and including the end token
    sampling_logp: Tensor  # (N, L) log-probabilities under the model that has sampled them
    texts: list[str]


@torch.no_grad()
def sample(model, task: Task, inputs: dict[str, Tensor], n: int, max_tokens: int, greedy: bool = False) -> Completions:
    """Sample n completions of each of the P prompts."""
    # transformers would draw from the 50 likeliest tokens alone, and take a sampled image token for a picture
    how = {"do_sample": not greedy, "top_k": None if greedy else 0, "num_return_sequences": n}
    how |= {"suppress_tokens": task.tokenizer.convert_tokens_to_ids(["<|image_pad|>"])}
    out = model.generate(**inputs, **how, max_new_tokens=max_tokens, output_logits=True, return_dict_in_generate=True)
    ids = out.sequences[:, inputs["input_ids"].shape[1] :]  # (N, L)
    ended = (ids == task.tokenizer.eos_token_id).int()
    mask = ended.cumsum(1) - ended == 0  # no end token before this one
    logp = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, ids[..., None])[..., 0]  # (N, L)
    texts = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Completions(ids, mask, logp.masked_fill(~mask, 0), texts)


def token_logp(model, inputs: dict[str, Tensor], done: Completions, part: Tensor) -> Tensor:
    """Return the log-probabilities (n, L) of the completions with the indices `part` (n,); padding has 0."""
    ids, num_prompts = done.ids[part], len(inputs["input_ids"])
    prompt_of = part // (len(done.ids) // num_prompts)  # each prompt once per completion; packing.py avoids this
    patches = inputs["pixel_values"].unflatten(0, (num_prompts, -1))  # (P, patches of a picture, 1176)
    logits = model(
        input_ids=torch.cat([inputs["input_ids"][prompt_of], ids], dim=1),
        mm_token_type_ids=torch.cat([inputs["mm_token_type_ids"][prompt_of], torch.zeros_like(ids)], dim=1),
        pixel_values=patches[prompt_of].flatten(0, 1),
        image_grid_thw=inputs["image_grid_thw"][prompt_of],
        logits_to_keep=ids.shape[1] + 1,
    ).logits[:, :-1]  # a token is predicted at the position before it
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].masked_fill(~done.mask[part], 0)


def group_advantages(rewards: Tensor, kind: str = "group") -> Tensor:
    """Return the advantages (P, G) of rewards (P, G): how much better than its group, in standard deviations."""
    varied = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True) > 1e-6  # else exactly 0
    centred = (rewards - rewards.mean(dim=1, keepdim=True)) * varied
    scaled = centred / (rewards.std(dim=1, keepdim=True) + 1e-6)
    return {"group": scaled, "no_std": centred, "no_mean": rewards}[kind]


def token_weights(mask: Tensor, normaliser: str = "sequence") -> Tensor:
    """Return the weight (N, L) of each token in the loss; padding has none."""
    divisor = {"sequence": len(mask) * mask.sum(dim=1, keepdim=True), "token": mask.sum(), "sum": 1}[normaliser]
    return mask / divisor


def grpo_loss(
    logp: Tensor, old_logp: Tensor, sampling_logp: Tensor, ref_logp: Tensor, advantages: Tensor, settings: Settings
) -> Tensor:
    """Return each token's loss (n, L), from log-probabilities (n, L) and advantages (n, 1)."""
    ratio = (logp - old_logp).exp()  # 1 at the first update, but its gradient is that of log π
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if settings.importance_cap:
        objective = objective * (old_logp - sampling_logp).exp().clamp(max=settings.importance_cap)
    kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    return settings.beta * kl - objective


def step(model, sampler, reference, optimizer, task: Task, rows: list[dict[str, str]], settings: Settings) -> dict:
    """Take one step on P rows and return its metrics."""
    inputs = encode(task, "train", rows)  # line 5
    done = sample(sampler, task, inputs, settings.group, settings.max_tokens)  # line 7
    answers = [row["answer"] for row in rows for _ in range(settings.group)]
    rewards = torch.tensor([*map(count_reward, done.texts, answers)]).view(-1, settings.group)  # line 8
    advantages = group_advantages(rewards, settings.advantage).view(-1, 1)  # line 9
    weights = token_weights(done.mask, settings.normaliser)  # before the batch is cut, so that the cut does not matter
    parts = torch.arange(len(answers)).split(64)  # micro-batches
    old, ref = torch.zeros_like(done.sampling_logp), torch.zeros_like(done.sampling_logp)
    for iteration in range(settings.iterations):  # line 10
        for part in parts:
            logp = token_logp(model, inputs, done, part)
            if iteration == 0:
                old[part] = logp.detach()  # π_old is the policy before the first update
                with torch.no_grad():
                    ref[part] = token_logp(reference, inputs, done, part) if settings.beta else old[part]
            per_token = grpo_loss(logp, old[part], done.sampling_logp[part], ref[part], advantages[part], settings)
            (weights[part] * per_token).sum().backward()  # line 11
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "reward": rewards.mean().item(),
        "varied": (rewards.amax(dim=1) > rewards.amin(dim=1)).float().mean().item(),  # groups that teach
        "length": done.mask.sum(dim=1).float().mean().item(),
        "grad_norm": grad_norm.item(),
        "entropy": -(done.sampling_logp.sum() / done.mask.sum()).item(),  # of a token, estimated
        "sampler_difference": ((old - done.sampling_logp).abs().sum() / done.mask.sum()).item(),
    }


def exact_match(model, task: Task, rows: list[dict[str, str]], settings: Settings) -> float:
    """Return the fraction of held-out rows that greedy decoding counts right."""
    texts = sample(model, task, encode(task, "test", rows), 1, settings.max_tokens, greedy=True).texts
    return sum(count_reward(text, row["answer"]) == 1 for text, row in zip(texts, rows)) / len(rows)


def train(settings: Settings) -> list[dict]:
    """Train, and return the metrics of each step."""
    if settings.group < 2:
        raise SystemExit("error: --group must be at least 2: an advantage compares the completions of a group")
    torch.manual_seed(settings.seed)
    task, model = load_task(settings), load_model(settings.data)  # line 1
    sampler, reference = copy.deepcopy(model), copy.deepcopy(model)  # line 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    order = np.random.default_rng(settings.seed).permutation(task.rows["train"])
    log, started = [], time.time()
    for i in range(settings.steps + 1):  # line 4
        metrics = {"step": i, "seconds": time.time() - started}
        if i % settings.eval_every == 0 or i == settings.steps:
            metrics["exact_match"] = exact_match(model, task, task.rows["test"][: settings.eval_rows], settings)
        if i % settings.sync_every == 0:
            sampler.load_state_dict(model.state_dict())  # line 6
        if i < settings.steps:
            rows = order.take(range(i * settings.prompts, (i + 1) * settings.prompts), mode="wrap")
            metrics |= step(model, sampler, reference, optimizer, task, rows, settings)
        log.append(metrics)
        print(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
    return log


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    comments = dict(re.findall(r"^    (\w+): .*  # (.*)$", pathlib.Path(__file__).read_text(), re.MULTILINE))
    for f in fields(Settings):
        kind = {"type": type(f.default), "default": f.default, "choices": get_args(f.type) or None}
        parser.add_argument(f"--{f.name}", help=f"{comments[f.name]} (default: {f.default})", **kind)
    settings = Settings(**vars(parser.parse_args()))
    log, output = train(settings), pathlib.Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(metrics) + "\n" for metrics in log))
