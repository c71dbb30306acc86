"""What a run leaves for people: metrics, curves and a page of sampled completions with their pictures.

    python report.py --run runs/demo                                          # draw curves and page again
    python report.py --run runs/demo --before runs/demo/before --after runs/demo/after      # two scores side by side

A run's folder holds `config.json` (with command and git commit), `metrics.jsonl` (one object a step),
`completions.jsonl` (sampled groups), and `curves.png` and `completions.html` made from them during the run.
"""

import base64
import contextlib
import html
import io
import json
import math
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

import parallel
from cli import UserError, need, run
from data import TAG
from packing import Group

os.environ.setdefault("MPLBACKEND", "Agg")  # pictures go to files, whatever screens there are
GROUPS_A_REPORT = 3  # groups kept of a reported step
GROUPS_ON_PAGE = 60  # most groups on the page, the newest
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
THUMBNAIL = 256  # longest side of a picture on the page


@dataclass
class Config:
    """Draw a run's curves and completions page, or put two scores side by side."""

    run: str
    """The run's folder."""
    before: str | None = None
    """Folder with the scores.json of the starting model."""
    after: str | None = None
    """Folder with the scores.json of the trained model."""


@dataclass(kw_only=True)
class RunFlags:
    """The flags of what a training run leaves and when."""

    output: str = "runs/grpo"
    """Folder for metrics, curves, completions, checkpoints and the final model."""
    overwrite: bool = False
    """Replace a run that is already in `output`."""
    resume: str | None = None
    """Go on from a checkpoint's folder; alone, from the newest whole one in `output`; auto: from that one, or from the
    start where there is none yet."""
    eval_data: str | None = None
    """Held-out rows, scored before training, every `eval_every` steps and at the end."""
    eval_every: int = 0
    """Steps between evaluations on `eval_data`; 0: only before and after."""
    save_every: int = 50
    """Steps between checkpoints; 0: one at the end alone, whatever ends the run."""
    keep_last: int = 2
    """Checkpoints that are kept, the newest ones; 0: all."""
    keep_best: bool = False
    """Save after the evaluation with the best reward on `eval_data` too, and keep that one."""
    max_skipped: int = 3
    """Updates whose loss or gradient is not a number are left out; a step that ends with so many in a row ends it."""
    hang_timeout: float = 30.0
    """Minutes that a process waits for the others before the run ends with an error."""
    report_every: int = 10
    """Steps between refreshes of curves.png and completions.html."""

    def check_run(self) -> None:
        """Raise ValueError for settings that cannot be."""
        need(self.report_every >= 1, "report_every must be at least 1")
        steps = min(self.eval_every, self.save_every, self.keep_last)
        need(steps >= 0, "eval_every, save_every and keep_last must not be negative")
        need(self.max_skipped >= 1 and self.hang_timeout > 0, "max_skipped must be at least 1, hang_timeout above 0")
        need(not self.keep_best or self.eval_data is not None, "keep_best needs eval_data to tell which one is best")


# --- metrics ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of a step's parts: `with clock("train"): ...`. A part's end waits for its work on the GPU."""

    def __init__(self):
        self.begun = time.perf_counter()
        self.laps: dict[str, list[float]] = {}  # seconds of a part, each time
        self.memory = 0  # most bytes of the GPU in use at the end of a part, by everything

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        parallel.note(part)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # what PyTorch counts would hold what a sleeping vLLM gave back
            self.memory = max(self.memory, total - free)
        self.laps.setdefault(part, []).append(time.perf_counter() - begun)


def slowest(laps: list[list[float]]) -> tuple[float, float]:
    """Seconds that rounds take in which all processes wait for the last one, and the share of them that a process
    waits; `laps`: every process's own seconds of each round."""
    rounds = list(zip(*laps))
    taken = sum(map(max, rounds))
    return taken, 1 - sum(map(sum, rounds)) / len(laps) / taken


def step_metrics(
    names: list[str],
    groups: list[Group],
    drawn: torch.Tensor,
    updates: list[dict[str, torch.Tensor]],
    clock: Clock,
) -> dict[str, float]:
    """A step's metrics from all processes; the README's glossary says what each one means.

    `drawn` (groups, G, 2 + names): the reward of every completion that was sampled, the same before the overlong
    penalty, and its parts by their `names`.
    `updates`: sums over the tokens of each update.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(r.ids) for r in rollouts], dtype=torch.float64)
    truncated = torch.tensor([r.truncated for r in rollouts], dtype=torch.float64)
    sums = parallel.all_sum(torch.stack([lengths.sum(), truncated.sum(), torch.tensor(len(rollouts)).double()]))
    longest = parallel.all_max(torch.tensor([max((len(r.ids) for r in rollouts), default=0)]))
    tokens = sum(u["tokens"] for u in updates).clamp(min=1)
    sampling, idle = slowest(parallel.gather_from_all(clock.laps["rollout"]))
    seconds = {part: sum(laps) for part, laps in clock.laps.items()} | {"rollout": sampling}

    def mean(name: str) -> float:
        return (sum(u[name] for u in updates) / tokens).item()

    drawn, parts = drawn[..., 0], drawn[..., 2:]
    step_time = time.perf_counter() - clock.begun
    has_verdict = ~drawn.isnan()
    spread = drawn.nan_to_num(nan=-math.inf).amax(1) > drawn.nan_to_num(nan=math.inf).amin(1)
    centred = (drawn - drawn.nanmean(1, keepdim=True)).nan_to_num()
    within = (centred.square().sum(1) / (has_verdict.sum(1) - 1).clamp(min=1)).sqrt()
    return {
        "reward": drawn.nanmean().item(),
        "reward_std": within.mean().item(),
        **{f"rewards/{name}": parts[..., i].nanmean().item() for i, name in enumerate(names)},
        "rewards/no_verdict": 1 - has_verdict.double().mean().item(),
        "frac_reward_zero_std": 1 - spread.double().mean().item(),
        "groups_drawn": len(drawn),
        "completions/mean_length": (sums[0] / sums[2]).item(),
        "completions/max_length": longest.item(),
        "completions/clipped_ratio": (sums[1] / sums[2]).item(),
        "step_time": step_time,
        **{f"time/{part}": taken for part, taken in seconds.items()},
        "idle/rollout": idle,
        "tokens_per_second": sums[0].item() / step_time,
        "loss": sum(u["loss"] for u in updates).item() / len(updates),
        "grad_norm": sum(u["grad_norm"] for u in updates).item() / len(updates),
        "grad_norm_spike": float(any(u["spike"] for u in updates)),
        "updates_skipped": sum(u["skipped"] for u in updates).item(),
        "clip_ratio": mean("clip_ratio"),
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "sampling/logp_difference_mean": mean("difference"),
        "sampling/logp_difference_image": _share(updates, "image_difference", "image_tokens"),
        "sampling/logp_difference_text": _share(updates, "difference", "tokens", "image_"),
        "sampling/logp_difference_max": max(u["difference_max"] for u in updates).item(),
        "mfu": sum(u["flop"] for u in updates).item() / parallel.world_size() / seconds["train"] / peak_flops(),
        "memory_gib": clock.memory / 2**30,
    }


def _share(updates: list[dict[str, torch.Tensor]], part: str, of: str, less: str = "") -> float:
    """The sum of `part` over the sum of `of`, those of `less` taken off both; NaN where there is none."""
    sums = [sum(u[name] - (u[less + name] if less else 0) for u in updates).item() for name in (part, of)]
    return sums[0] / sums[1] if sums[1] else math.nan


def peak_flops() -> float:
    """What this GPU does at most in a second, dense bfloat16, by its maker; NaN for one that is not listed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), math.nan)


class RunLog:
    """Writes a run's files from the first process; on the others it does nothing."""

    def __init__(self, folder: str, config: dict[str, Any], every: int, resumed: int | None = None):
        """`resumed`: the step after which an earlier run goes on here; None for a new one. Raises UserError when the
        folder cannot be written to."""
        self.folder, self.every, self.resumed = pathlib.Path(folder), every, resumed
        self.waiting: dict[str, str] = {}  # lines of each file that the disk had no room for
        self.full = False  # and it has been said
        if not parallel.is_main():
            return
        about = {
            "launch": parallel.launch(),
            "command": shlex.join(sys.argv),
            "git_commit": git_commit(),
            "world_size": parallel.world_size(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "completions.jsonl"):  # the steps after the checkpoint are taken again
                rows = read_rows(self.folder / name) if resumed is not None else []
                self._replace(name, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= resumed))
            self._replace("config.json", json.dumps(config | about, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write into {folder!r} ({error.strerror}): make room or choose another --output"
            ) from None

    def _replace(self, name: str, text: str) -> None:
        """Written beside its place and renamed: what was there is whole until then."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(self.folder / name)

    def _append(self, name: str, line: str) -> None:
        """A line to a file; when there is no room, which is said once, it waits in memory for the next one."""
        lines, path = self.waiting.pop(name, "") + line, self.folder / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # half a line may have found room
            if not self.full:
                print(f"{path} cannot be written ({error.strerror}): its rows wait in memory", file=sys.stderr)
            self.full, self.waiting[name] = True, lines

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl; every `every` steps the curves and the page are drawn again. What a resumed run
        adds to the step it goes on from, the scores that were still owed, joins that step's line."""
        if not parallel.is_main() or not metrics:
            return
        row = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        rows = read_rows(self.folder / "metrics.jsonl") if step == self.resumed else []
        if rows and rows[-1]["step"] == step:
            self._replace("metrics.jsonl", "".join(json.dumps(r) + "\n" for r in [*rows[:-1], rows[-1] | row]))
        else:
            self._append("metrics.jsonl", json.dumps(row) + "\n")
        if step % self.every == 0 and step:
            self.refresh()

    def completions(self, step: int, groups: list[Group]) -> None:
        """A few of this process's groups, at the first step and every `every` steps."""
        if not parallel.is_main() or (step % self.every and step != 1):
            return
        for group in groups[:GROUPS_A_REPORT]:
            row = {
                "step": step,
                "source": group.sample.source,
                "question": group.sample.prompt.replace(TAG, "").strip(),
                "answer": group.sample.answer,
                "images": [thumbnail(image) for image in group.prompt.images],
                "completions": [
                    {"text": r.text, "reward": _finite(r.reward), "advantage": r.advantage, "truncated": r.truncated}
                    for r in group.rollouts
                ],
            }
            self._append("completions.jsonl", json.dumps(row, ensure_ascii=False) + "\n")

    def refresh(self) -> None:
        """Draw curves.png and completions.html again, and write what waits for room."""
        if not parallel.is_main():
            return
        for name in list(self.waiting):
            self._append(name, "")
        with contextlib.suppress(OSError):  # they are drawn again
            draw_curves(self.folder)
            write_page(self.folder)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def refuse_to_mix_runs(folder: str, overwrite: bool, resumed: bool) -> None:
    """Raise UserError when `folder` cannot be written to, or holds a run that this one neither replaces nor has
    `resumed`."""
    path = pathlib.Path(folder)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write into {str(existing)!r}: choose another --output")
    saved = any(path.glob("checkpoint-*[0-9]"))
    holds_a_run = saved or (path / "metrics.jsonl").exists() or (path / "final").exists()
    if holds_a_run and not (overwrite or resumed):
        what = "holds a run: --resume goes on with it," if saved else "holds a run without a checkpoint:"
        raise UserError(f"{folder!r} {what} --overwrite replaces it")
    if parallel.local_world_size() < parallel.world_size():
        _refuse_folders_apart(path)


def _refuse_folders_apart(path: pathlib.Path, patience: float = 10.0) -> None:
    """Raise UserError, on every process, when not all machines of the run see the same folder `path`."""
    mark = path / f".seen-{parallel.gather_from_all(uuid.uuid4().hex)[0]}"
    if parallel.is_main():
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    parallel.wait_for_all()
    deadline = time.monotonic() + patience  # a shared file system may show it a little later
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [rank for rank, saw in enumerate(parallel.gather_from_all(seen)) if not saw]
    if parallel.is_main():
        mark.unlink()
    if blind:
        raise UserError(
            f"--output {str(path)!r} is another folder for rank {blind[0]}: every process writes its part of a "
            "checkpoint there, so all machines have to share it"
        )


def git_commit() -> str | None:
    """The commit of this checkout, with «-dirty» when files differ from it; None outside one."""
    here = pathlib.Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    done = (
        subprocess.run(command, cwd=here, capture_output=True, text=True, check=False) if shutil.which("git") else None
    )
    return done.stdout.strip() if done and done.returncode == 0 else None


def read_rows(path: pathlib.Path) -> list[dict]:
    """The objects of a .jsonl file, a last line broken off by a kill left out; none when there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


# --- curves -----------------------------------------------------------------------------------------------------------


def draw_curves(folder: pathlib.Path) -> None:
    """curves.png: reward, held-out exact match, completion length, and KL or the sampler's difference, over steps."""
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        return

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    import matplotlib.pyplot as plt  # here, since most processes draw nothing

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (reward, match), (length, difference) = axes
    _draw(reward, *series("reward"), "mean reward of a step", "reward", smooth=True)
    steps, values = series("eval/exact_match")
    match.plot(steps, values, "o-", color="#0b7a75")
    match.set(title="held-out exact match, greedy", ylabel="share right", ylim=(-0.02, 1.02))
    _draw(length, *series("completions/mean_length"), "mean completion length", "tokens", smooth=True)
    if any(row.get("kl") for row in rows):
        _draw(difference, *series("kl"), "KL to the starting model (k3)", "nats a token", smooth=True)
    else:
        name = "sampling/logp_difference_mean"
        _draw(difference, *series(name), "|log p(trainer) − log p(sampler)|", "nats a token")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if not axis.has_data():
            axis.text(0.5, 0.5, "not measured yet", ha="center", va="center", transform=axis.transAxes)
    save_figure(figure, folder / "curves.png")


def _draw(axis, steps: list[int], values: list[float], title: str, unit: str, smooth: bool = False) -> None:
    axis.plot(steps, values, color="#d1495b", alpha=0.35 if smooth else 1.0, linewidth=1, label="step")
    if smooth and values:
        running, average = values[0], []
        for value in values:
            running += 0.15 * (value - running)
            average.append(running)
        axis.plot(steps, average, color="#d1495b", linewidth=2, label="running mean")
        axis.legend()
    axis.set(title=title, ylabel=unit)


def save_figure(figure, path: pathlib.Path) -> None:
    """Written beside its place and renamed: a viewer never sees half a picture."""
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path.with_suffix(".partial"), format="png", dpi=110)
    finally:
        plt.close(figure)
    path.with_suffix(".partial").rename(path)


# --- page -------------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 66em; padding: 0 1em; color: #222; }
article { display: flex; flex-wrap: wrap; gap: 1.2em; border-top: 1px solid #ddd; padding: 1.2em 0; }
figure { margin: 0; flex: 0 0 15em; } figure img { width: 100%; image-rendering: pixelated; border: 1px solid #ccc; }
figcaption b { display: block; margin-top: .4em; } section { flex: 1 1 30em; min-width: 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25em .6em; vertical-align: top; }
th.number, td.number { width: 1%; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: .9em; }
tr.right { background: #e5f4e3; } tr.wrong { background: #fbeaea; } tr.near { background: #fdf6e0; }
"""


def write_page(folder: pathlib.Path) -> None:
    """completions.html: picture, question, right answer and the completions with reward and advantage."""
    rows = read_rows(folder / "completions.jsonl")[-GROUPS_ON_PAGE:]
    articles = "\n".join(_article(row) for row in reversed(rows))
    name = html.escape(folder.name)
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>Completions of {name}</title><style>{STYLE}</style><h1>Completions of {name}</h1>"
        "<p>Sampled during training, newest first: each picture with its question, the right answer, and the group of "
        f"completions that GRPO compares.</p>\n{articles}</html>\n"
    )
    partial = folder / "completions.html.partial"
    partial.write_text(text, encoding="utf-8")
    partial.rename(folder / "completions.html")


def _article(row: dict) -> str:
    pictures = "".join(f"<img alt='' src='{source}'>" for source in row["images"])
    lines = []
    for completion in row["completions"]:
        reward = completion["reward"]
        kind = "" if reward is None else "right" if reward >= 1 else "near" if reward > 0 else "wrong"
        text = html.escape(completion["text"]) + (" <i>… cut off</i>" if completion["truncated"] else "")
        shown = "no verdict" if reward is None else f"{reward:.2f}"
        lines.append(
            f"<tr class='{kind}'><td class='number'>{shown}</td>"
            f"<td class='number'>{completion['advantage']:+.2f}</td><td class='text'>{text}</td></tr>"
        )
    return (
        f"<article><figure>{pictures}<figcaption><b>{html.escape(row['question'])}</b>right answer: "
        f"{html.escape(row['answer'])}<br>step {row['step']}</figcaption></figure><section><table>"
        "<tr><th class='number'>reward</th><th class='number'>advantage</th><th>completion</th></tr>"
        f"{''.join(lines)}</table></section></article>"
    )


def thumbnail(image: Image.Image) -> str:
    """The picture as a data URI, reduced when it is large."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# --- side by side -----------------------------------------------------------------------------------------------------


def compare(folder: pathlib.Path, before: pathlib.Path, after: pathlib.Path) -> None:
    """Write scores.json with both scores and print them side by side."""
    scores = {}
    for name, source in (("before", before), ("after", after)):
        try:
            scores[name] = json.loads((source / "scores.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"no scores in {source} ({error}): run evaluate.py with --output {source} first") from None
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(f"\n{'':24}{'before':>10}{'after':>10}")
    for name in ("exact_match", "reward", "format_rate", "mean_length", "n"):
        values = [scores[which][name] for which in ("before", "after")]
        print(f"{name:24}" + "".join(f"{v:10.3f}" if isinstance(v, float) else f"{v:10}" for v in values))
    print(f"\ncurves       {folder / 'curves.png'}\ncompletions  {folder / 'completions.html'}")
    print(f"scores       {folder / 'scores.json'}\nmodel        {folder / 'final'}")


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.run)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {cfg.run!r}: give the folder that grpo.py wrote (--output)")
    draw_curves(folder)
    write_page(folder)
    if cfg.before and cfg.after:
        compare(folder, pathlib.Path(cfg.before), pathlib.Path(cfg.after))


if __name__ == "__main__":
    run(main, Config)
