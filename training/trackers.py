"""Weights & Biases and TensorBoard (`--log_to`): the numbers of metrics.jsonl, and the sampled completions.

A tracker is only imported when it is asked for. It never stops the run: a tracker that fails is left out from then on.
"""

import base64
import contextlib
import io
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from common import console
from common.console import hide_credentials
from common.files import atomic_write

FINISH_TIMEOUT = 60.0  # seconds that W&B may take to upload the rest when the run ends
WANDB_ID = "wandb_id"  # file in the output folder with the id of the W&B run


class Trackers:
    """Sends the rows of `metrics.jsonl` and `completions.jsonl` to the trackers. Used by the main process only."""

    def __init__(self, names: tuple[str, ...], folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None):
        """Open the trackers `names` ("wandb", "tensorboard") for a new run, or for one resumed after `resumed_step`.

        `config` is shown by W&B; it must not contain credentials.
        """
        self.open: dict[str, WandB | TensorBoard] = {}
        for name in names:
            with self._left_out_on_error(name):
                self.open[name] = TRACKERS[name](folder, config, resumed_step)

    def metrics(self, row: dict[str, float | None]) -> None:
        """Log the numbers of a row under its step. Values that are not finite (None) have no point in the curve."""
        numbers = {name: value for name, value in row.items() if name != "step" and value is not None}
        self._call(lambda tracker: tracker.metrics(row["step"], numbers))

    def completions(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows of one step: question, images, and completions with rewards."""
        self._call(lambda tracker: tracker.completions(rows[0]["step"], rows) if rows else None)

    def close(self, failed: bool) -> None:
        """Upload the rest and end the trackers' runs. Call it before a process that may end with `os._exit`."""
        self._call(lambda tracker: tracker.close(failed))

    def _call(self, log: Callable[["WandB | TensorBoard"], None]) -> None:
        for name, tracker in list(self.open.items()):
            with self._left_out_on_error(name):
                log(tracker)

    @contextlib.contextmanager
    def _left_out_on_error(self, name: str) -> Iterator[None]:
        """Report any exception in one line and leave the tracker out for the rest of the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong in a tracker may stop the run
            self.open.pop(name, None)
            reason = hide_credentials(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
            console.log(f"{name} failed ({reason}): the run continues without it; metrics.jsonl has all steps")


class WandB:
    """A W&B run named after the output folder. A resumed run continues the W&B run whose id is in the folder."""

    def __init__(self, folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None):
        import wandb

        id_file = folder / WANDB_ID
        if resumed_step is None or not id_file.is_file():
            atomic_write(id_file, uuid.uuid4().hex)
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,  # it would upload the command line, in which URLs may contain passwords
            x_save_requirements=False,
            login_timeout=30,
            init_timeout=30,
            finish_timeout=FINISH_TIMEOUT,
        )
        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo-vlm"),
            name=os.environ.get("WANDB_NAME", folder.absolute().name),
            id=id_file.read_text().strip(),
            resume="allow",
            dir=folder,
            config=config,
            settings=settings,
        )
        # W&B's own counter must not go backwards, but a resumed run repeats steps: the curves have our step as x-axis.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def metrics(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a step."""
        self.run.log(numbers | {"step": step})

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log a table with one row per completion, and the images of the prompts."""
        columns = ["question", "answer", "text", "reward", "advantage", "truncated"]
        table = self.wandb.Table(columns=columns)
        for row in rows:
            for completion in row["completions"]:
                table.add_data(*((row | completion)[name] for name in columns))
        images = [self.wandb.Image(_decode(image), caption=row["question"]) for row in rows for image in row["images"]]
        self.run.log({"completions": table, "step": step} | ({"images": images} if images else {}))

    def close(self, failed: bool) -> None:
        """Upload the rest and mark the run as finished or failed."""
        self.run.finish(exit_code=int(failed))


class TensorBoard:
    """Event files in the folder `tensorboard` of the output folder."""

    def __init__(self, folder: pathlib.Path, config: dict[str, Any], resumed_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what earlier event files have from this step on: a resumed run repeats these steps.
        first_step = 0 if resumed_step is None else resumed_step + 1
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def metrics(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a step."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log, for each group, a text with the question and the completions, and the images of the prompt."""
        import numpy as np

        for i, row in enumerate(rows):
            parts = [f"{row['question']}\n\ngold answer: {row['answer']}"]
            parts += [f"reward {c['reward']}, advantage {c['advantage']}:\n{c['text']}" for c in row["completions"]]
            code = "\n\n---\n\n".join("    " + part.replace("\n", "\n    ") for part in parts)  # no Markdown
            self.writer.add_text(f"completions/{i}", code, step)
            for j, image in enumerate(row["images"]):
                self.writer.add_image(f"images/{i}/{j}", np.array(_decode(image)), step, dataformats="HWC")
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Close the event file."""
        self.writer.close()


TRACKERS = {"wandb": WandB, "tensorboard": TensorBoard}


def _decode(uri: str) -> Image.Image:
    """Return the image of a data URI that `common.figures.thumbnail` has made."""
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
