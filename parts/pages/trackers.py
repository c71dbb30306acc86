"""Weights & Biases, TensorBoard and trackio (`--log_to`). Each is only imported when it is asked for.

A tracker is a pair of functions: log(step, numbers, lines of completions.jsonl), and close(failed).
"""

import base64
import importlib.util
import io
import os
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

from PIL import Image

from common import console
from common.console import hide_credentials
from common.errors import require
from common.files import atomic_write

Tracker = tuple[Callable[[int, dict[str, float], list[dict[str, Any]]], None], Callable[[bool], None]]


def check_packages(names: tuple[str, ...]) -> None:
    """Raise ValueError if the package of one of the trackers `names` is missing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        is_package = bool(spec and spec.origin)  # W&B's own folder "wandb" has no origin
        require(is_package, f"log_to {name}: the package is missing; run pip install {name}, or leave it out")


class Trackers:
    """The trackers of a run. One that fails is left out from then on, and never stops the run."""

    def __init__(self, names: list[str], folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None):
        """`config` is uploaded, so it must not contain credentials."""
        self.running: dict[str, Tracker] = {}
        for name in names:
            if tracker := self._attempt(name, TRACKERS[name], folder, config, resumed_step):
                self.running[name] = tracker

    def log(self, step: int, numbers: dict[str, float], groups: list[dict[str, Any]]) -> None:
        for name, (log, _) in list(self.running.items()):
            self._attempt(name, log, step, numbers, groups)

    def close(self, failed: bool) -> None:
        for name, (_, close) in list(self.running.items()):
            self._attempt(name, close, failed)

    def _attempt(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a tracker
            self.running.pop(name, None)
            reason = hide_credentials(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            console.log(f"{name} failed ({reason}): the run continues without it; metrics.jsonl has all steps")


def start_wandb(folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None) -> Tracker:
    """Start a W&B run named after the output folder, or continue the one whose id is in the folder."""
    import wandb

    id_file = folder / "wandb_id"
    if resumed_step is None or not id_file.is_file():
        atomic_write(id_file, uuid.uuid4().hex)
    settings = {"silent": True, "console": "off", "login_timeout": 30, "finish_timeout": 60}
    # Else, W&B would upload code, and the command line, in which URLs may contain passwords.
    settings |= {"disable_code": True, "disable_git": True, "x_disable_meta": True}
    project = os.environ.get("WANDB_PROJECT", "grpo-vlm")
    name = os.environ.get("WANDB_NAME", folder.absolute().name)
    run_id = id_file.read_text().strip()
    run = wandb.init(
        project=project, name=name, id=run_id, resume="allow", dir=folder, config=config, settings=settings
    )
    # W&B's own counter must not go backwards, but a resumed run repeats steps: the curves have our step as x-axis.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def log(step: int, numbers: dict[str, float], groups: list[dict[str, Any]]) -> None:
        run.log({"step": step} | numbers | _media(wandb, groups))

    return log, lambda failed: run.finish(exit_code=int(failed))


def start_trackio(folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None) -> Tracker:
    """Start a trackio run named after the output folder, or continue the newest one of that name."""
    import trackio

    resume = "never" if resumed_step is None else "allow"
    trackio.init(project="grpo-vlm", name=folder.absolute().name, config=config, resume=resume)

    def log(step: int, numbers: dict[str, float], groups: list[dict[str, Any]]) -> None:
        trackio.log(numbers | _media(trackio, groups), step=step)

    return log, lambda failed: trackio.finish()


def start_tensorboard(folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None) -> Tracker:
    """Write the numbers to the folder `tensorboard` of the output folder."""
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard hides what earlier event files have from this step on: a resumed run repeats these steps.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0 if resumed_step is None else resumed_step + 1)

    def log(step: int, numbers: dict[str, float], groups: list[dict[str, Any]]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, lambda failed: writer.close()


TRACKERS = {"wandb": start_wandb, "tensorboard": start_tensorboard, "trackio": start_trackio}


def _media(tracker: Any, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a table of completions, and the images of the prompts, as objects of the module `tracker`."""
    columns = ["question", "answer", "text", "reward", "advantage", "truncated"]
    cells = [
        [(group | completion)[name] for name in columns] for group in groups for completion in group["completions"]
    ]
    media = {"completions": tracker.Table(columns=columns, data=cells)} if groups else {}
    for i, group in enumerate(groups):
        for j, uri in enumerate(group["images"]):
            image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
            media[f"images/{i}/{j}"] = tracker.Image(image, caption=group["question"])
    return media
