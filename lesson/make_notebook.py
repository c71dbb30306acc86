"""Make lesson/grpo.ipynb from the one file, and run it: `python -m lesson.make_notebook`.

The code of the notebook is that of grpo_in_one_file.py, function by function; only the cells in between are written
here. They run in this process, so that no Jupyter is needed. What they print and draw becomes their output.
"""

import ast
import base64
import contextlib
import io
import json
import pathlib

import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).parent
SETTINGS = "Settings(steps=10)"  # the tests give others

TITLE = """# GRPO for a vision-language model

A tiny Qwen2.5-VL counts shapes. Above three, most of its labels were one too low, and GRPO makes it unlearn that. The
code is [grpo_in_one_file.py](grpo_in_one_file.py), piece by piece; `python -m lesson.make_notebook` has made this
notebook from it. Once, before the first cell: `python -m apps.demo.tiny --task count`."""
IMPORTS = """import copy
import csv
import os
import pathlib
import re
import time
from dataclasses import dataclass
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

if pathlib.Path.cwd().name == "lesson":  # as Jupyter starts it
    os.chdir("..")"""
DRAWINGS = """settings = %s
torch.manual_seed(settings.seed)
task, model = load_task(settings), load_model(settings.data)
rows = task.rows["test"][:4]
figure, panels = plt.subplots(1, 4, figsize=(8, 2))
for row, panel in zip(rows, panels):
    panel.imshow(Image.open(task.folder / "test" / row["images_path"]))
    panel.set_title(row["answer"], fontsize=8)
    panel.axis("off")"""
GROUP = """from collections import Counter

inputs = encode(task, "test", rows)
done = sample(model, task, inputs, 8, settings.max_tokens)
for i, row in enumerate(rows):
    print(f"{row['answer']}: {dict(Counter(done.texts[8 * i : 8 * i + 8]))}")"""
ADVANTAGES = """answers = [row["answer"] for row in rows for _ in range(8)]
rewards = torch.tensor([*map(count_reward, done.texts, answers)]).view(4, 8)
advantages = group_advantages(rewards)
figure, panels = plt.subplots(1, 2, figsize=(8, 2))
shown = (("rewards", rewards, (0.7, 1)), ("advantages", advantages, (-2, 2)))
for panel, (name, values, bounds) in zip(panels, shown):
    drawn = panel.imshow(values, cmap="RdYlGn", clim=bounds)
    panel.set(title=name, xlabel="completion", ylabel="drawing", xticks=[], yticks=[])
    figure.colorbar(drawn)"""
GRADIENT = """logp = token_logp(model, inputs, done, torch.arange(32))
per_token = grpo_loss(logp, logp.detach(), done.sampling_logp, logp.detach(), advantages.view(-1, 1), settings)
(token_weights(done.mask) * per_token).sum().backward()
with_image = inputs["mm_token_type_ids"].sum().item() // 4
print(f"{logp.shape[1]} tokens at most, {with_image} image tokens in each prompt")
print(f"norm of the gradient: {torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9):.3f}")"""
CURVES = """figure, panels = plt.subplots(1, 3, figsize=(9, 2.2), layout="tight")
for panel, name in zip(panels, ("exact_match", "reward", "entropy")):
    shown = [(line["step"], line[name]) for line in log if name in line]
    panel.plot(*zip(*shown), marker=".")
    panel.set(title=name, xlabel="step")"""


def pieces() -> dict[str, str]:
    """Return the source of each function and class of the one file, by name."""
    source = (FOLDER / "grpo_in_one_file.py").read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def cells(settings: str = SETTINGS) -> list[tuple[str, str]]:
    """Return the kind, "markdown" or "code", and the source of each cell."""
    code = pieces()

    def of(*names: str) -> str:
        return "\n\n\n".join(code[name] for name in names)

    return [
        ("markdown", TITLE),
        ("code", IMPORTS),
        ("code", of("Settings")),
        ("markdown", "## Data\n\nA prompt is a system message, a picture and a question; a completion earns a reward."),
        ("code", of("Task", "load_task", "load_model", "encode", "count_reward")),
        ("code", DRAWINGS % settings),
        (
            "markdown",
            "## Sampling (line 7)\n\nEight completions of each prompt, with log-probabilities.",
        ),
        ("code", of("Completions", "sample")),
        ("code", GROUP),
        ("markdown", "## Rewards and advantages (lines 8 and 9)\n\nEach completion against the others of its group."),
        ("code", of("group_advantages")),
        ("code", ADVANTAGES),
        ("markdown", "## The loss (line 11)\n\nThe same tokens again, now with a gradient."),
        ("code", of("token_logp", "token_weights", "grpo_loss")),
        ("code", GRADIENT),
        ("markdown", "## One step, and training\n\nAlgorithm 1 of DeepSeekMath; the comments have its line numbers."),
        ("code", of("step")),
        ("code", of("exact_match", "train")),
        ("code", "log = train(settings)"),
        ("code", CURVES),
        ("markdown", "Next: [change this, look at that](README.md#change-this-look-at-that)."),
    ]


def execute(source: str, namespace: dict) -> list[dict]:
    """Run a cell and return its outputs: what it prints, and the figures that it leaves open."""
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), namespace)
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80)
        plt.close(number)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def make(settings: str = SETTINGS) -> dict:
    """Return the notebook, run with `settings`, the code of a `Settings`."""
    plt.switch_backend("Agg")
    plt.close("all")  # a cell's output has all figures
    namespace, made, runs = {"__name__": "__main__"}, [], 0
    for i, (kind, source) in enumerate(cells(settings)):
        cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source.splitlines(keepends=True)}
        if kind == "code":
            runs += 1
            cell |= {"execution_count": runs, "outputs": execute(source, namespace)}
        made.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    (FOLDER / "grpo.ipynb").write_text(json.dumps(make(), indent=1, ensure_ascii=False) + "\n")
