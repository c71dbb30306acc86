"""Train a model of real weights with this project and with TRL, or with several settings; draw and list the scores.

    python apps/bench/real.py                                # after ./run.sh real: six seeds each, one after another
    python apps/bench/real.py --recipe vlm --seeds 0 1 2     # after ./run.sh vlm
    python apps/bench/real.py --programs grpo --seeds 0 1 2 --steps 60 --flags learning_rate=1e-5 --together 3
    python apps/bench/real.py --seeds --draw docs/real.png           # no runs: only the table and the picture

The settings are those of recipes/real.flags or recipes/vlm.flags, which real_trl.py shares. Each run that ends adds a
line to the file of results, with its machine. Runs that are there already are not repeated, so the work can be spread
over many commands. With `--together`, several runs share each GPU; what they take for a step is then not comparable.
"""

import itertools
import json
import os
import pathlib
import queue
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
import speed

from common import cli
from common.figures import save_figure
from common.files import read_jsonl

Program = Literal["grpo", "trl"]
Recipe = Literal["real", "vlm"]
TITLES = {
    "real": "Gemma 3 270M learns to add: 512 held-out sums, greedy; thin: each seed",
    "vlm": "What does the shape in the picture cost? 512 held-out questions, greedy; thin: each seed",
}
ROWS = {"real": ("train.jsonl", "test.jsonl"), "vlm": ("prices-train.jsonl", "prices-some.jsonl")}
EVAL_EVERY = {"real": 20, "vlm": 10}
MODELS = {"real": "runs/real/data/model", "vlm": "runs/vlm/sft-0/final"}
COLOURS = {"grpo": "tab:blue", "trl": "tab:orange"}
NAMES = {"grpo": "grpo-vlm", "trl": "TRL 1.16"}
GIB_TOGETHER = {"real": 24, "vlm": 32}  # GPU memory of each of several runs of this project on one GPU
START_APART = 35  # seconds between the starts of such runs: vLLM does not start while free memory changes
starting = threading.Lock()


@dataclass
class Config:
    """Train several times, and compare."""

    recipe: Recipe = "real"
    """Whose flags, model and rows: those of `./run.sh real` or `./run.sh vlm`, which has to have made them."""
    data: str | None = None
    """Folder with the rows; by default, the recipe's."""
    model: str | None = None
    """Folder of the model that is trained; by default, the recipe's."""
    programs: tuple[Program, ...] = ("grpo", "trl")
    """What trains: this project, TRL, or both in turn."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Seeds, each of which gives one run of each program."""
    steps: int = 100
    """Number of steps of a run."""
    flags: tuple[str, ...] = ()
    """Further flags for grpo.py, as NAME=VALUE, or NAME=true; of these, TRL knows learning_rate alone."""
    together: int = 1
    """Number of runs at a time on each GPU."""
    results: str | None = None
    """File with one line for each run; by default, docs/results/RECIPE.jsonl."""
    output: str | None = None
    """Folder for the runs and their logs; by default, runs/bench/RECIPE."""
    draw: str | None = None
    """Draw the runs with the settings of the recipe to this PNG file."""

    def __post_init__(self) -> None:
        self.data = self.data or f"runs/{self.recipe}/data"
        self.model = self.model or MODELS[self.recipe]
        self.results = self.results or str(ROOT / "docs" / "results" / f"{self.recipe}.jsonl")
        self.output = self.output or f"runs/bench/{self.recipe}"
        if min(self.steps, self.together) < 1:
            raise ValueError("steps and together must be at least 1")
        if bad := [flag for flag in self.flags if "=" not in flag]:
            raise ValueError(f"flags {bad[0]}: give NAME=VALUE")
        if "trl" in self.programs and any(not flag.startswith("learning_rate=") for flag in self.flags):
            raise ValueError("flags: TRL knows learning_rate alone; give --programs grpo")


def cut(results: list[dict[str, Any]], steps: int) -> dict[tuple[str, tuple[str, ...]], dict[int, dict[str, Any]]]:
    """Return the runs of at least `steps` steps, by program and flags, then by seed, with their curves up to there.

    The learning rate is constant, so the first steps of a longer run are those of a shorter one.
    """
    groups: dict[tuple, dict[int, dict]] = defaultdict(dict)
    for run in sorted(results, key=lambda run: (run["program"], run["flags"], run["seed"])):
        if run["steps"] >= steps:
            curve = [(step, score) for step, score in run["curve"] if step <= steps]
            groups[run["program"], tuple(run["flags"])][run["seed"]] = run | {"curve": curve, "whole": run["curve"]}
    return groups


def command(cfg: Config, program: str, seed: int, folder: pathlib.Path) -> list[str]:
    """Return the command that trains one run."""
    if program == "trl":
        rates = [f"--{flag.replace('=', ' ')}" for flag in cfg.flags]
        flags = [f"--output {folder}/trl.json --steps {cfg.steps} --seed {seed}", *rates]
        flags += [f"--recipe {cfg.recipe} --model {cfg.model} --eval_every {EVAL_EVERY[cfg.recipe]}"]
        return [sys.executable, str(HERE / "real_trl.py"), cfg.data, *shlex.split(" ".join(flags))]
    recipe = shlex.split((ROOT / "recipes" / f"{cfg.recipe}.flags").read_text(), comments=True)
    settings: dict[str, Any] = {
        name: f"{cfg.data}/{file}" for name, file in zip(("data", "eval_data"), ROWS[cfg.recipe])
    }
    settings |= {"model": cfg.model, "output": f"{folder}/run", "seed": seed, "max_steps": cfg.steps}
    settings |= {"eval_every": EVAL_EVERY[cfg.recipe], "save_every": 0, "report_every": 0}
    settings |= {"gpu_memory": GIB_TOGETHER[cfg.recipe]} if cfg.together > 1 else {}
    settings |= dict(flag.split("=", 1) for flag in cfg.flags)
    pairs = ((f"--{name}",) if value == "true" else (f"--{name}", str(value)) for name, value in settings.items())
    given = itertools.chain.from_iterable(pairs)
    return [sys.executable, "grpo.py", *recipe, *given, "--overwrite"]


def read_run(program: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return the held-out scores of a run, [[step, score], ...], and the seconds of its steps."""
    if program == "trl":
        return json.loads((folder / "trl.json").read_text())
    logged = read_jsonl(folder / "run" / "metrics.jsonl")
    curve = [[row["step"], row["eval/reward"]] for row in logged if row.get("eval/reward") is not None]
    trained = [row for row in logged if "step_time" in row]
    nats = {
        name: mean_of(trained, f"sampling/logp_difference_{kind}")
        for name, kind in (("nats", "mean"), ("nats_image", "image"), ("nats_text", "text"))
    }
    rewards = [row["reward"] for row in trained]
    gib = max(row["memory_gib"] or 0.0 for row in trained)
    seconds = [row["step_time"] for row in trained]
    return {"curve": curve, "seconds": seconds, "reward": rewards, "gib": gib} | nats


def mean_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the steps that have it, or None."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.mean(values) if values else None


def train(cfg: Config, program: str, seed: int, places: queue.Queue[str]) -> str:
    """Train one run on the next free place, a GPU; add its result, and return a line about it."""
    place = places.get()
    name = "-".join([program, *(flag.replace("=", "-") for flag in cfg.flags), str(cfg.steps), str(seed)])
    folder = pathlib.Path(cfg.output) / name
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": place, "MASTER_PORT": str(29600 + hash(name) % 10000)}
    with (folder / "log.txt").open("w") as log:
        with starting:
            started = time.perf_counter()
            line = command(cfg, program, seed, folder)
            process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=log)
            time.sleep(START_APART if cfg.together > 1 else 0)
        status = process.wait()
    places.put(place)
    if status:
        return f"{name} failed with status {status}; see {folder / 'log.txt'}"
    result = {"program": program, "flags": cfg.flags, "steps": cfg.steps, "seed": seed, "together": cfg.together}
    result |= read_run(program, folder) | {"total": time.perf_counter() - started} | speed.provenance()
    with open(cfg.results, "a") as file:
        file.write(json.dumps(result) + "\n")
    return f"{name}: {result['curve'][-1][1]:.3f} in {result['total']:.0f} s"


def show(results: list[dict[str, Any]], steps: int) -> None:
    """Print a line for each program and setting: held-out scores after `steps` steps, and what a step takes alone.

    At its end, by how many nats sampler and trainer differ, on rows with pictures and on others.
    """
    for (program, flags), runs in cut(results, steps).items():
        first = next(iter(runs.values()))["curve"][0][1]
        scores = [run["curve"][-1][1] for run in runs.values()]
        rose = sum(score > first + 0.05 for score in scores)
        spread = f"{statistics.mean(scores):.3f} ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
        alone = [second for run in runs.values() if run["together"] == 1 for second in run["seconds"][5:]]
        pace = f"{statistics.median(alone):.2f} s a step" if alone else ""
        nats = [f"{run[name]:.4f}" for run in runs.values() for name in ("nats_image", "nats_text") if run.get(name)]
        line = f"{NAMES[program]:9}{' '.join(flags):44} rose {rose} of {len(runs)}  {spread:14} {pace:14}"
        print(f"{line}  {first:.3f} -> {' '.join(f'{score:.3f}' for score in scores)}  {' '.join(nats)}")


def draw(results: list[dict[str, Any]], path: str, steps: int, recipe: Recipe) -> None:
    """Draw the held-out scores of each program with the settings of the recipe: each run, and the mean of the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (program, flags), runs in cut(results, steps).items():
        if flags:
            continue
        columns = [*zip(*(run["curve"] for run in runs.values()))]  # one for each evaluation
        places = [column[0][0] for column in columns]
        scores = [[score for _, score in column] for column in columns]
        label, colour = f"{NAMES[program]}, mean of {len(runs)} seeds", COLOURS[program]
        axes.plot(places, [*map(statistics.mean, scores)], color=colour, marker="o", label=label)
        for run in runs.values():
            axes.plot(*zip(*run["whole"]), color=colour, linewidth=1, alpha=0.5)
    axes.set(xlabel="step", ylabel="held-out answers that are right", ylim=(0, None))
    axes.set_title(TITLES[recipe], fontsize=10)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, pathlib.Path(path))


def main(cfg: Config) -> None:
    path = pathlib.Path(cfg.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = cut(read_jsonl(path) if path.exists() else [], cfg.steps)
    jobs = [(program, seed) for seed in cfg.seeds for program in cfg.programs]
    jobs = [(program, seed) for program, seed in jobs if seed not in done.get((program, cfg.flags), {})]
    places: queue.Queue[str] = queue.Queue()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(1, torch.cuda.device_count()))))
    for gpu in gpus.split(",") * cfg.together:
        places.put(gpu)
    with ThreadPoolExecutor(max(1, places.qsize())) as pool:
        for line in pool.map(lambda job: train(cfg, *job, places), jobs):
            print(line, flush=True)
    results = read_jsonl(path) if path.exists() else []
    show(results, cfg.steps)
    if cfg.draw:
        draw(results, cfg.draw, cfg.steps, cfg.recipe)


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
