"""Save and resume a run exactly, and export a checkpoint in Hugging Face layout.

    python -m training.checkpoint --checkpoint runs/grpo/checkpoint-40 --output exported    # as a model or adapter

A checkpoint holds the trained parameters and the optimizer state in `torch.distributed.checkpoint` format, the random
states of every process, the prompts that partial rollouts have in flight, and `state.json` with everything else.
Threads write the tensors while training continues. The next optimizer step, which changes them, first waits until they
have been read (`Saver.wait_until_read`): on a GPU, until parts/fast has copied them to host memory.
`run_folder.py` names, finds and deletes the checkpoints of a run.
"""

import contextlib
import json
import math
import random
import shutil
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from common import cli, console, distributed
from common.console import hide_credentials
from common.errors import RunStopped, UserError, require
from common.parts import extra
from config import PolicyFlags
from policy.export import export
from policy.model import Policy, load_policy
from policy.optimizer import Optimizers
from policy.sharding import AFTER_UPDATE
from training.run_folder import RunFolder, named_checkpoint

IN_FLIGHT = "in_flight.pt"  # the prompts of partial rollouts that are not trained on yet
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # frozen weights come from the starting model
WRITING_THREADS = 8  # each holds one tensor at a time in host memory


@dataclass
class Config:
    """Write a checkpoint in Hugging Face layout, or in PEFT layout if an adapter was trained."""

    checkpoint: str
    """Folder of the checkpoint."""
    output: str
    """Folder for the model or adapter; it must not exist yet."""


class Saver:
    """Saves the checkpoints of a run in the background."""

    def __init__(self, folder: RunFolder, resumed_step: int | None):
        """`resumed_step`: the step after which the run continues."""
        self.folder = folder
        self.newest = resumed_step  # the step of the newest complete checkpoint in the folder
        # for the collectives of the writing thread
        self.group = dist.new_group(backend="gloo", timeout=distributed.TIMEOUT)
        self.thread = ThreadPoolExecutor(1)
        self.pending: tuple[Future[None], int] | None = None  # the write in progress, and its step
        self.was_read = threading.Event()  # whether that write no longer needs the trained tensors
        self.save_failed = False  # whether the last requested checkpoint could not be written

    def save(self, tensors: dict[str, Any], state: dict[str, Any], wait: bool = False) -> None:
        """Write checkpoint-STEP in the background, or before returning if `wait`.

        Does nothing if the checkpoint already exists. `tensors` are `state_tensors`; `state` holds "step" and
        everything else, as `read_progress` returns it. All processes must call this together. An error is printed and
        sets `save_failed`, but does not prevent later saves.
        """
        self.wait()
        self.save_failed = False
        if state["step"] != self.newest:
            tensors = _local_state(tensors)
            if error := self._missing_space(tensors) or self._start_write(tensors, state):
                self._report_failure(state["step"], error)
        if wait:
            self.wait()

    def wait(self) -> str | None:
        """Wait until all processes have written the pending checkpoint. Print and return the first error of any."""
        if self.pending is None:
            return None
        step = self.pending[1]
        error = distributed.first_error(self.join_write())
        if error:
            self._report_failure(step, error)
        else:
            self.newest = step
        return error

    def join_write(self) -> str | None:
        """Wait for the write of this process only, and return its error. Unlike `wait`, this is not a collective."""
        if self.pending is None:
            return None
        (future, step), self.pending = self.pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - several libraries write to the disk
            shutil.rmtree(self.folder.partial(step), ignore_errors=True)
            return self._describe(error)
        return None

    def wait_until_read(self) -> None:
        """Wait until the write in progress no longer needs the trained tensors. Call this before they change."""
        if self.pending:
            self.was_read.wait()

    def write_failed(self) -> bool:
        """Return whether this process has already failed to write. Does not wait for the write to finish."""
        future = self.pending[0] if self.pending else None
        return future is not None and future.done() and future.exception() is not None

    def resume_hint(self, action: str = "continue") -> str:
        """Return a phrase that tells the user how to resume the run after it has ended; `action` is a verb phrase."""
        return self._status() if self.newest is None else f"{self._status()}: {action} with --resume"

    def export_final(self, policy: Policy, source: str) -> None:
        """Export the trained model to the folder `final`; see `policy.export.export`.

        Raises RunStopped if the export fails. The message names the checkpoint that can be exported instead.
        """
        try:
            export(policy, source, f"{self.folder.path}/final", str(self.folder.path))
        except RunStopped as error:
            if self.newest is None:
                raise
            newest = self.folder.path / f"checkpoint-{self.newest}"
            hint = f"to export it elsewhere: python -m training.checkpoint --checkpoint {newest} --output DIR"
            raise RunStopped(f"{error}; {hint}", error.status) from None

    def _missing_space(self, tensors: dict[str, Any]) -> str | None:
        """Return an error message if the disk has too little free space for the `tensors` of all processes."""
        sizes = [distributed.local_tensor(leaf).nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        needed = int(1.02 * int(distributed.all_sum(torch.tensor(sum(sizes))))) + 2**20  # with the format's overhead
        place = next(filter(Path.exists, [self.folder.path, *self.folder.path.absolute().parents]))  # if it was moved
        free = distributed.all_gather(shutil.disk_usage(place).free)[0]
        if needed <= free:
            return None
        return (
            f"a checkpoint takes {needed / 1e9:.3f} GB, but {str(self.folder.path)!r} has only {free / 1e9:.3f} GB "
            f"left: free another {(needed - free) / 1e9:.3f} GB"
        )

    def _start_write(self, tensors: dict[str, Any], state: dict[str, Any]) -> str | None:
        """Start writing `tensors`. Return the first error of any process; all get the same result."""
        error, partial = None, self.folder.partial(state["step"])
        try:
            partial.mkdir(parents=True, exist_ok=True)
            torch.save(random_states(), partial / f"random-{distributed.rank()}.pt")
            if console.is_main():
                collector = dict(state["collector"])
                if in_flight := collector.pop("in_flight", None):  # they hold tensors
                    torch.save(in_flight, partial / IN_FLIGHT)
                text = json.dumps(state | {"collector": collector}, indent=1, default=float)  # for optimizers' tensors
                (partial / "state.json").write_text(hide_credentials(text))
        except (OSError, RuntimeError, TypeError, ValueError) as exception:  # of a full disk, or what JSON cannot hold
            error = self._describe(exception)
        error = distributed.first_error(error)
        if error:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the last optimizer step; the threads read on a stream of their own
            self.was_read.clear()
            self.pending = self.thread.submit(self._write, tensors, state["step"]), state["step"]
        return error

    def _write(self, tensors: dict[str, Any], step: int) -> None:
        """Write `tensors` and publish the checkpoint. Runs in the writing thread."""
        # `publish` flushes the files to disk. With a single thread, torch would copy on the default stream, after all
        # queued work of training. With several tensors in a file, torch would hold all of them in host memory.
        options = {"thread_count": WRITING_THREADS, "sync_files": False, "single_file_per_rank": False}
        writer = FileSystemWriter(self.folder.partial(step), **options)
        fast = host_copies()
        try:
            with ThreadPoolExecutor(1) as pool:
                planner = fast.HostCopyPlanner(pool, self.was_read.set) if fast else None
                dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
        finally:
            self.was_read.set()
        if console.is_main():  # `dcp.save` returns here when all processes have written
            self.folder.publish(step)

    def _report_failure(self, step: int, error: str) -> None:
        self.save_failed = True
        console.log(f"could not save checkpoint-{step}: {error}; {self._status()}")

    def _status(self) -> str:
        return "there is no checkpoint" if self.newest is None else f"checkpoint-{self.newest} is complete"

    def _describe(self, error: BaseException) -> str:
        """Return a one-line description of a failed write."""
        text = "".join(traceback.format_exception(error)).strip()  # with the errors that caused it
        if "No space left" in text or "Disk quota exceeded" in text:
            return f"the disk of {str(self.folder.path)!r} is full"
        return text.splitlines()[-1][:200]


def host_copies() -> ModuleType | None:
    """Return parts/fast on a GPU, if it is there. If None, the next update waits until a checkpoint is written."""
    return extra("fast") if torch.cuda.is_available() else None


def state_tensors(policy: Policy, reference: Policy | None, optimizers: Optimizers) -> dict[str, Any]:
    """Return the tensors that a checkpoint holds, by the name of their parameter. They are not copies.

    PyTorch's `get_state_dict` would take a dummy step with an optimizer that has not made its state yet.
    """
    names, state, groups = {parameter: name for name, parameter in policy.named_parameters()}, {}, []
    for optimizer, _ in optimizers:
        for parameter, entry in optimizer.state.items():
            state[names[parameter]] = entry
            shapes = {parameter.shape, distributed.local_tensor(parameter).shape} - {torch.Size()}
            for key, value in entry.items() if isinstance(parameter, DTensor) else ():
                if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape in shapes:
                    where = f"the state {key!r} of {names[parameter]}"  # only one process's shard would be saved
                    raise UserError(f"OPTIMIZERS: {where} is not sharded: make it with torch.zeros_like(parameter)")
        groups += [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    parameters = get_model_state_dict(policy, options=TRAINED)
    tensors = {"policy": parameters, "optimizer": {"state": state, "param_groups": groups}}
    if AFTER_UPDATE:  # otherwise, the reference is the starting model
        tensors["reference"] = {name: p for name, p in reference.named_parameters() if name in parameters}
    return tensors


def parts_of(policy: Policy, optimizers: Optimizers) -> list[str]:
    """Return the names of what a run and its checkpoint must share: each optimizer's parameters, and `AFTER_UPDATE`."""
    names = {parameter: name for name, parameter in policy.named_parameters()}
    parts = []
    for i, (optimizer, _) in enumerate(optimizers, 1):
        kind = "AdamW" if isinstance(optimizer, torch.optim.AdamW) else type(optimizer).__name__  # offloaded or not
        parts += [f"{names[p]} in optimizer {i} ({kind})" for group in optimizer.param_groups for p in group["params"]]
    return parts + [f"AFTER_UPDATE[{name!r}]" for name in AFTER_UPDATE]


def _local_state(tensors: dict[str, Any]) -> dict[str, Any]:
    """Remove from `tensors` what other processes save, and return the rest.

    Processes that hold the same shards divide them among themselves, so that each shard is copied and saved once.
    """
    parameters = tensors["policy"]
    meshes = (p.device_mesh for p in parameters.values() if isinstance(p, DTensor) and p.device_mesh.ndim > 1)
    if (mesh := next(meshes, None)) is None:
        return tensors
    names = list(parameters)
    indices_by_copy = distributed.partition_lpt([parameters[name].numel() for name in names], mesh.size(0))
    chosen = {names[i] for i in indices_by_copy[mesh.get_coordinate()[0]]}
    for held in (parameters, tensors["optimizer"]["state"], tensors.get("reference", {})):
        for name in held.keys() - chosen:
            del held[name]
    return tensors


# --- loading ----------------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of the global random number generators, which dropout, plugins and libraries may use.

    Sampling does not use them: its seeds are derived from the run's seed and the position of the prompt.
    """
    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)}
    states["torch"] = torch.get_rng_state()
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states returned by `random_states`."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise a UserError of one line for whatever goes wrong while the checkpoint in `folder` is read here."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - its files may hold anything
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1][:160]
        how = "use the flags and the version of the run that saved it or, if it is damaged, restore it, or delete it"
        raise UserError(f"{folder} cannot be loaded into this run ({reason}): {how}") from None


def read_progress(folder: Path) -> dict[str, Any]:
    """Return `state.json`. Raises UserError if it has another form than a checkpoint of this version."""
    with reading(folder):
        state = json.loads((folder / "state.json").read_text())
        config, collector, updater, _ = (state[name] for name in ("config", "collector", "updater", "parts"))
        is_one = config.keys() >= {field.name for field in fields(PolicyFlags)}
        counts = (state["step"], collector["position"], updater["num_updates"], updater["skipped"])
        numbers = (config["learning_rate"], *collector["lengths"].values(), *updater["norms"])
        is_one &= type(state["eval_due"]) is bool and all(type(count) is int and count >= 0 for count in counts)
        is_one &= all(type(number) in (int, float) and abs(number) < math.inf for number in numbers)
        require(is_one and config["learning_rate"] >= 0, "it is of another version")
    return state


def check_parts(folder: Path, state: dict[str, Any], policy: Policy, optimizers: Optimizers) -> None:
    """Raise UserError unless run and checkpoint have the same optimizers, and the same functions in `AFTER_UPDATE`."""
    run, saved = parts_of(policy, optimizers), state["parts"]
    both = ("it has {}, this run has not", saved, set(run)), ("this run has {}, it has not", run, set(saved))
    for who, parts, others in both:
        if missing := [part for part in parts if part not in others]:
            first = missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            how = "use the same OPTIMIZERS and AFTER_UPDATE, or a new --output without --resume"
            raise UserError(f"--resume: {folder}: {who.format(first)}: {how}")


def load_checkpoint(folder: Path, policy: Policy, reference: Policy | None, optimizers: Optimizers) -> None:
    """Load the tensors and random states of `folder`. Within `reading`, raises UserError if they do not fit the run.

    The number of processes may differ from that of the saved run; additional processes keep their initial random
    states. Learning rate and weight decay are those of the new command.
    """
    _make_state(folder, policy, optimizers)
    tensors = state_tensors(policy, reference, optimizers)
    del tensors["optimizer"]["param_groups"]
    dcp.load(tensors, checkpoint_id=folder)
    random_path = folder / f"random-{distributed.rank()}.pt"
    if random_path.is_file():
        restore_random_states(torch.load(random_path, weights_only=True))


def _make_state(folder: Path, policy: Policy, optimizers: Optimizers) -> None:
    """Make the optimizer state that `folder` holds and that an optimizer would make only in its first step."""
    saved, parameters = FileSystemReader(folder).read_metadata(), dict(policy.named_parameters())
    groups = [(optimizer.state, group) for optimizer, _ in optimizers for group in optimizer.param_groups]
    owners = {parameter: (state, group) for state, group in groups for parameter in group["params"]}
    for key, path in saved.planner_data.items():
        if path[:2] != ("optimizer", "state") or (parameter := parameters.get(path[2])) not in owners:
            continue
        state, group = owners[parameter]
        entry, value = state[parameter], saved.state_dict_metadata[key]
        for name in path[3:-1]:
            entry = entry.setdefault(name, {})
        if path[-1] not in entry and isinstance(value, TensorStorageMetadata):
            on_host = not (value.size or group.get("fused") or group.get("capturable"))  # as PyTorch's step counts are
            empty = torch.zeros(value.size, device="cpu" if on_host else parameter.device)
            like = parameter if value.size == parameter.shape else empty
            entry[path[-1]] = torch.zeros_like(like, dtype=value.properties.dtype)
        entry.setdefault(path[-1])  # None if it is not a tensor


def main(cfg: Config) -> None:
    device = distributed.start()
    folder = named_checkpoint(Path(cfg.checkpoint), "--checkpoint")
    if Path(cfg.output).exists():
        raise UserError(f"--output {cfg.output!r} already exists: remove it or choose another folder")
    saved = read_progress(folder)["config"]
    flags = PolicyFlags(**{field.name: saved[field.name] for field in fields(PolicyFlags)})
    with reading(folder):
        policy = load_policy(saved["model"], flags, torch.device("cpu") if not flags.load_in_4bit else device)
        dcp.load({"policy": get_model_state_dict(policy, options=TRAINED)}, checkpoint_id=folder)
    export(policy, saved["model"], cfg.output, str(folder.parent))
    print(f"wrote {'an adapter for ' + saved['model'] if flags.has_adapter else 'a model'} to {cfg.output}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
