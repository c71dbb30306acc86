"""Save and resume a run exactly, and export a checkpoint in Hugging Face layout.

    python -m training.checkpoint --checkpoint runs/grpo/checkpoint-40 --output exported    # as a model or adapter

A checkpoint is a folder `checkpoint-STEP`. It holds the trained parameters and the optimizer state in
`torch.distributed.checkpoint` format, the random states of every process, `state.json` with everything else, and
`manifest.json` with the size and hash of each file.

The tensors are copied to host memory, and a thread writes them to a temporary folder while training continues. The
folder is flushed to disk and renamed when it is complete, so a killed run never leaves a partial checkpoint under the
final name. The hashes reveal a damaged checkpoint before any of it is loaded.
"""

import datetime
import errno
import hashlib
import json
import pathlib
import random
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from common import cli, console, distributed
from common.distributed import partition_lpt
from common.errors import RunStopped, UserError
from common.files import flush, partial_path
from config import PolicyFlags, RunFlags
from policy.model import Policy, load_policy
from policy.optimizer import make_optimizer
from training.export import export

# Settings that must stay the same when a run is resumed: they determine the order of the prompts, the trained
# parameters, the objective and the number of updates. Settings that are often changed during a run, such as the
# learning rate, β, the temperature or the completion length, are not listed.
MUST_MATCH = (
    "task",
    "data",
    "data_weights",
    "rows",
    "rows_digest",
    "model",
    "seed",
    "prompts_per_step",
    "num_generations",
    "prompts_per_update",
    "num_iterations",
    "loss_type",
    "reward",
    "lora_rank",
    "lora_alpha",
    "adapter",
    "load_in_4bit",
    "train_vision",
)
RUN_STATE = ("step", "position", "best", "norms", "skipped", "unscored")  # attributes of `grpo.Run` that are saved
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # frozen weights come from the starting model
MANIFEST = "manifest.json"
SUPERSEDED_SUFFIX = ".before-resume"


@dataclass
class Config:
    """Write a checkpoint in Hugging Face layout, or in PEFT layout if an adapter was trained."""

    checkpoint: str
    """Folder of the checkpoint."""
    output: str
    """Folder for the model or adapter; it must not exist yet."""


@dataclass(frozen=True)
class ResumePlan:
    """Where a run starts."""

    checkpoint: pathlib.Path | None
    """The checkpoint to resume from; None for a new run."""
    continues_output: bool
    """Whether that checkpoint is of the run in the output folder, which is then continued."""
    replaces_output: bool
    """Whether a run in the output folder may be replaced without `--overwrite`."""


class Checkpoints:
    """The checkpoints of a run: saved in the background, pruned, and found when the run is resumed."""

    def __init__(self, output: str, keep_last: int = 0, keep_best: bool = False, timeout: float = 30.0):
        """`timeout`: minutes that a save may wait for another process before the save fails."""
        self.folder, self.keep_last, self.keep_best = pathlib.Path(output), keep_last, keep_best
        max_wait = datetime.timedelta(minutes=timeout)
        self.group = dist.new_group(backend="gloo", timeout=max_wait)  # for the collectives of the writing thread
        self.thread = ThreadPoolExecutor(1)
        self.pending: tuple[Future[None], int] | None = None  # the write in progress, and its step
        self.newest: int | None = None  # step of the newest complete checkpoint of this run
        self.save_failed = False  # whether the last requested checkpoint could not be written
        self.replaces = False  # whether this run may replace the run in `output`; set by `find`

    def save(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        progress: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Write checkpoint-STEP in the background, or before returning if `last`.

        Does nothing if the checkpoint already exists. `progress` holds "step", "best" and everything else that
        `load_checkpoint` should return. All processes must call this together. An error is printed and sets
        `save_failed`, but does not prevent later saves.
        """
        self.wait()
        error = None
        if progress["step"] != self.newest:
            error = self._start_write(policy, optimizer, scheduler, progress)
        self.save_failed = error is not None
        if error:
            self._report_failure(progress["step"], error)
        if last:
            self.wait()

    def _start_write(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        progress: dict[str, Any],
    ) -> str | None:
        """Start writing the checkpoint. Return the first error of any process; all processes get the same result."""
        tensors = _local_state(*get_state_dict(policy, optimizer, options=TRAINED))
        if error := self._check_disk_space(tensors):
            return error
        partial = partial_path(self.folder / f"checkpoint-{progress['step']}")
        state = progress | {"scheduler": scheduler.state_dict(), "world_size": distributed.world_size()}
        error = self._attempt(lambda: _create_folder(partial, state))
        if not error:
            random_path = partial / f"random-{distributed.rank()}.pt"
            error = self._attempt(lambda: torch.save(random_states(), random_path))
        if error:
            shutil.rmtree(partial, ignore_errors=True)
            return error
        writes: list[Future] = []
        error = self._attempt(
            lambda: writes.append(dcp.async_save(tensors, checkpoint_id=partial, process_group=self.group))
        )
        if writes:
            work = self.thread.submit(self._finish, writes[0], partial, progress["step"], progress["best"])
            self.pending = work, progress["step"]
        return error

    def _attempt(self, write: Callable[[], None]) -> str | None:
        """Call `write`. Return the first error of any process; all processes get the same result."""
        message = None
        try:
            write()
        except (OSError, RuntimeError, CheckpointException) as error:  # torch.save raises RuntimeError on a full disk
            message = self._describe(error)
        return distributed.first_error(message)

    def _report_failure(self, step: int, error: str) -> None:
        self.save_failed = True
        if console.is_main():
            print(f"could not save checkpoint-{step}: {error}; {self.status()}", file=sys.stderr)

    def status(self) -> str:
        """Return a phrase that names the checkpoint from which the run could now resume."""
        return "there is no checkpoint yet" if self.newest is None else f"checkpoint-{self.newest} is complete"

    def resume_hint(self, action: str = "continue") -> str:
        """Return a phrase that tells the user how to resume the run after it has ended; `action` is a verb phrase."""
        if self.newest is None:
            return "there is no checkpoint"
        if self.save_failed:
            return f"checkpoint-{self.newest} is the newest: continue with --resume"
        return f"checkpoint-{self.newest} is complete: {action} with --resume"

    def export_final(self, policy: Policy, source: str) -> None:
        """Export the trained model to the folder `final`; see `training.export.export`.

        Raises RunStopped if the export fails. The message names the checkpoint that can be exported instead.
        """
        try:
            export(policy, source, f"{self.folder}/final")
        except RunStopped as error:
            hint = "there is no checkpoint to export in its place"
            if self.newest is not None:
                newest = self.folder / f"checkpoint-{self.newest}"
                hint = f"to export it elsewhere: python -m training.checkpoint --checkpoint {newest} --output DIR"
            raise RunStopped(f"{error}; {hint}", error.status) from None

    def write_failed(self) -> bool:
        """Return whether this process's background write has already failed, without waiting for the write to end."""
        future = self.pending[0] if self.pending else None
        return future is not None and future.done() and future.exception() is not None

    def wait(self) -> str | None:
        """Wait until the pending checkpoint is on disk, on all processes.

        If any process has an error, the error is printed, and is returned on all processes.
        """
        step = self.pending[1] if self.pending else None
        error = distributed.first_error(self.join_write())
        if step is not None and error:
            self._report_failure(step, error)
        elif step is not None:
            self.newest = step
        return error

    def join_write(self) -> str | None:
        """Wait for the background write of this process and return its error.

        Unlike `wait`, this is not a collective: use it when the other processes may be anywhere in the program.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        future, step = pending
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - several libraries write to the disk
            shutil.rmtree(partial_path(self.folder / f"checkpoint-{step}"), ignore_errors=True)
            return self._describe(error)
        return None

    def _check_disk_space(self, tensors: dict[str, Any]) -> str | None:
        """Return an error message if the disk has too little free space for the `tensors` of all processes."""
        local = [
            t._local_tensor if isinstance(t, DTensor) else t for t in tree_leaves(tensors) if isinstance(t, Tensor)
        ]
        needed = int(distributed.all_sum(torch.tensor(sum(t.numel() * t.element_size() for t in local))))
        needed += needed // 50 + 2**20  # overhead of the file format
        free = shutil.disk_usage(self.folder).free if console.is_main() else 0
        free = distributed.all_gather(free)[0]
        if needed <= free:
            return None
        return (
            f"a checkpoint takes {needed / 1e9:.3f} GB, but {str(self.folder)!r} has only {free / 1e9:.3f} GB left: "
            f"free another {(needed - free) / 1e9:.3f} GB"
        )

    def _describe(self, error: BaseException) -> str:
        """Return a one-line description of the root cause of a failed write."""
        causes = _causes(error)
        disk_full = any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
        if disk_full or "No space left" in str(error):
            return f"the disk of {str(self.folder)!r} is full"
        return f"{type(causes[-1]).__name__}: {str(causes[-1])[:200]}"

    def _finish(self, write: Future, partial: pathlib.Path, step: int, best: dict[str, float] | None) -> None:
        """Wait until all processes have written their files. Rank 0 then writes the manifest and renames the folder.

        This runs in the writing thread.
        """
        write.result()
        dist.barrier(self.group)
        if console.is_main():
            write_manifest(partial)
            folder = self.folder / f"checkpoint-{step}"
            # An older checkpoint of the same step is kept under another name until the new one has been renamed.
            old = folder.with_name(f"{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            flush(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
            self._prune(step, best)

    def _prune(self, written: int, best: dict[str, float] | None) -> None:
        """Delete checkpoints up to step `written`, except the last `keep_last` and the best one.

        Superseded checkpoints up to that step are also deleted.
        """
        steps = {step: folder for step, folder in _checkpoints_by_step(self.folder).items() if step <= written}
        newest = sorted(steps)[-self.keep_last :] if self.keep_last else list(steps)
        kept = {*newest, best["step"] if self.keep_best and best else None}
        superseded = _checkpoints_by_step(self.folder, SUPERSEDED_SUFFIX)
        expired = [folder for step, folder in steps.items() if step not in kept]
        for folder in expired + [folder for step, folder in superseded.items() if step <= written]:
            shutil.rmtree(folder, ignore_errors=True)

    def prepare_output(self, step: int | None) -> None:
        """Prepare `output` for a run that resumes after `step`. If `step` is None (a new run), delete any earlier run.

        Checkpoints after `step` are renamed to `checkpoint-STEP.before-resume` and deleted once the run has saved a
        checkpoint of that step or a later one. All processes must call this together, after all other checks have
        passed.
        """
        steps = _checkpoints_by_step(self.folder)
        self.newest = step if step in steps else None
        if not console.is_main():
            return
        leftovers = ["checkpoint-*.partial"] if step is not None else ["checkpoint-*", "final"]
        for leftover in [path for pattern in leftovers for path in self.folder.glob(pattern)]:
            shutil.rmtree(leftover, ignore_errors=True)
        for later, folder in steps.items():
            if step is not None and later > step:
                superseded = folder.with_name(folder.name + SUPERSEDED_SUFFIX)
                shutil.rmtree(superseded, ignore_errors=True)
                folder.rename(superseded)

    def is_own(self, folder: pathlib.Path | None) -> bool:
        """Return whether `folder` is a checkpoint of the run in `output`."""
        return folder is not None and folder.resolve().parent == self.folder.resolve()

    def plan_resume(self, requested: str | None) -> ResumePlan:
        """Decide, the same on every process, what `--resume` means here; see `find`."""
        checkpoint = self.find(requested)
        return ResumePlan(checkpoint, self.is_own(checkpoint), self.replaces)

    def find(self, requested: str | None) -> pathlib.Path | None:
        """Return the checkpoint to resume from, or None to start a new run. The result is the same on every process.

        `requested` is a checkpoint's folder, "newest", "auto" (the newest if there is one) or None. After torchrun has
        restarted this launch, the newest checkpoint is used, whatever was requested. If the newest checkpoint is
        damaged, a message says so and the previous checkpoint is tried. Sets `replaces` when the run in `output`
        belongs to this launch, or when "auto" finds neither a checkpoint nor a final model. Raises UserError if there
        is no checkpoint or if the requested checkpoint is damaged.
        """
        result: tuple[bool, pathlib.Path | None, str] = (False, None, "")
        if console.is_main():
            # If a run was killed while it was replacing a checkpoint of the same step, only the old checkpoint is left:
            # restore its name.
            for step, folder in _checkpoints_by_step(self.folder, ".old").items():
                if step not in _checkpoints_by_step(self.folder):
                    folder.rename(folder.with_suffix(""))
            restarted = distributed.restarted() and self._is_same_launch()
            if _checkpoints_by_step(self.folder) and (restarted or requested == "auto"):
                requested = "newest"
            unfinished = requested == "auto" and not (self.folder / "final").exists()
            result = (restarted or unfinished, *self._find(None if requested == "auto" else requested))
        self.replaces, path, error = distributed.all_gather(result)[0]
        if error:
            raise UserError(error)
        return path

    def _find(self, requested: str | None) -> tuple[pathlib.Path | None, str]:
        """Return the requested checkpoint and an error message, which is empty if there is no error."""
        if not requested:
            return None, ""
        if requested == "newest":
            return self._find_newest()
        folder = pathlib.Path(requested)
        if (steps := _checkpoints_by_step(folder)) and not (folder / MANIFEST).exists():
            newest = steps[max(steps)]
            return None, f"--resume: {requested!r} is a run: pass one of its checkpoints, the newest is {newest}"
        return folder, verify_checkpoint(folder) or ""

    def _is_same_launch(self) -> bool:
        """Return whether the run in `output` was started by one of this launch's torchrun launchers."""
        path = self.folder / "config.json"
        launchers = json.loads(path.read_text()).get("launch") if path.is_file() else None
        return bool(set(launchers or []).intersection(distributed.launcher_ids()))

    def _find_newest(self) -> tuple[pathlib.Path | None, str]:
        """Return the newest complete checkpoint in `output` and an error message, as `_find` does."""
        steps = _checkpoints_by_step(self.folder)
        for step in sorted(steps, reverse=True):
            error = verify_checkpoint(steps[step])
            if error is None:
                return steps[step], ""
            fallback = "; trying the previous checkpoint" if step > min(steps) else ""
            print(f"{error}{fallback}", file=sys.stderr)
        problem = "no complete checkpoint" if steps else "no checkpoint"
        holds_run = steps or (self.folder / "metrics.jsonl").exists()
        flag = "use --overwrite instead" if holds_run else "leave out --resume"
        return None, f"--resume: {problem} in {str(self.folder)!r}; {flag} to start a new run"


def _causes(error: BaseException) -> list[BaseException]:
    """Return `error` and its chain of causes, the root cause last.

    A CheckpointException lists one error per failed process; only the first of these errors is followed.
    """
    chain = [error]
    while error := (
        next(iter(error.failures.values()))[0]
        if isinstance(error, CheckpointException) and error.failures
        else error.__cause__ or error.__context__
    ):
        chain.append(error)
    return chain


def _create_folder(partial: pathlib.Path, state: dict[str, Any]) -> None:
    """On the main process, create a folder that contains only `state.json`."""
    if console.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "state.json").write_text(json.dumps(state, indent=1))


def _local_state(parameters: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    """Return the state that this process saves.

    Processes that hold the same shards divide the parameters among themselves, so that each shard is saved once.
    """
    meshes = (p.device_mesh for p in parameters.values() if isinstance(p, DTensor) and p.device_mesh.ndim > 1)
    if (mesh := next(meshes, None)) is not None:
        names = list(parameters)
        indices_by_copy = partition_lpt([parameters[name].numel() for name in names], mesh.size(0))
        parameters = {names[i]: parameters[names[i]] for i in indices_by_copy[mesh.get_coordinate()[0]]}
        moments = moments | {"state": {name: s for name, s in moments["state"].items() if name in parameters}}
    return {"policy": parameters, "optimizer": moments}


def _checkpoints_by_step(folder: pathlib.Path, suffix: str = "") -> dict[int, pathlib.Path]:
    """Return the folders in `folder` that are named `checkpoint-STEP` plus `suffix`, keyed by step."""
    pattern = rf"checkpoint-(\d+){re.escape(suffix)}"
    matches = [(re.fullmatch(pattern, path.name), path) for path in folder.glob("checkpoint-*")]
    return {int(match[1]): path for match, path in matches if match}


# --- the manifest -----------------------------------------------------------------------------------------------------


def write_manifest(folder: pathlib.Path) -> None:
    """Write `manifest.json` with the size and hash of every file in `folder`, then flush everything to disk.

    The last line of the manifest is the hash of its other lines.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_hash, paths))
    files = {path.name: {"size": path.stat().st_size, "sha256": digest} for path, digest in zip(paths, hashes)}
    (folder / MANIFEST).write_bytes(_append_hash(json.dumps({"files": files}, indent=1).encode()))
    for path in [*paths, folder / MANIFEST, folder]:
        flush(path)


def _append_hash(text: bytes) -> bytes:
    return text + f"\n{hashlib.sha256(text).hexdigest()}\n".encode()


def verify_checkpoint(folder: pathlib.Path) -> str | None:
    """Compare the checkpoint in `folder` with its manifest; return an error message, or None if all bytes match."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
        text = manifest[:-66]  # the rest is a hash of 64 digits between two line breaks
        if manifest != _append_hash(text):
            return f"{folder}: its {MANIFEST} is damaged"
        files = json.loads(text)["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{folder}: {name} is damaged: it has {size} bytes, but {entry['size']} were written"
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(_hash, [folder / name for name in files]))
        for (name, entry), digest in zip(files.items(), hashes):
            if digest != entry["sha256"]:
                return f"{folder}: {name} is damaged: its hash differs from the one in {MANIFEST}"
    except (OSError, ValueError, KeyError) as error:
        return f"{folder} is not a complete checkpoint ({type(error).__name__}: {str(error)[:120]})"
    return None


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- loading ----------------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of the global random number generators of Python, NumPy and torch.

    Reward functions and libraries may use these generators. Sampling does not use them: its seeds are derived from the
    run's seed and the position of the prompt.
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


def load_checkpoint(
    folder: pathlib.Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    config: dict[str, Any],
) -> dict[str, Any]:
    """Load the tensors of `folder` into `policy`, `optimizer` and `scheduler`, and return the saved progress.

    The number of processes may differ from that of the saved run; additional processes keep their initial random
    states. Learning rate, weight decay and other changed settings are taken from the new command, and the changes are
    printed. Raises UserError if a setting in `MUST_MATCH` differs from `config`.
    """
    saved = json.loads((folder / "state.json").read_text())
    new = json.loads(json.dumps(config))
    old, ignored = saved["config"], {field.name for field in fields(RunFlags)}
    # an older version may not have saved all settings
    differing = [name for name in new if name in old and old[name] != new[name] and name not in ignored]
    changes = {name: f"{name} was {old[name]}, is {new[name]}" for name in differing}
    conflicts = [change for name, change in changes.items() if name in MUST_MATCH]
    if conflicts:
        raise UserError(
            f"--resume: {folder} belongs to another run ({', '.join(conflicts)}): "
            "use the same settings, or a new --output without --resume"
        )
    if changes and console.is_main():
        print(f"settings changed since the checkpoint: {', '.join(changes.values())}", file=sys.stderr)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    _load_tensors(folder, policy, optimizer)
    rates = list(scheduler.base_lrs)
    scheduler.load_state_dict(saved["scheduler"] | {"base_lrs": rates})
    for group, rate, schedule, decay in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, decays):
        group |= {"initial_lr": rate, "lr": rate * schedule(scheduler.last_epoch), "weight_decay": decay}
    random_path = folder / f"random-{distributed.rank()}.pt"
    if random_path.is_file():
        restore_random_states(torch.load(random_path, weights_only=True))
    return saved


def _load_tensors(folder: pathlib.Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
    try:
        dcp.load({"policy": parameters, "optimizer": moments}, checkpoint_id=folder)
    except CheckpointException as error:
        reason = str(_causes(error)[-1]).splitlines()[0][:160]
        message = f"{folder} cannot be loaded into this model ({reason}): use the flags of the run that saved it"
        raise UserError(message) from None
    set_state_dict(policy, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=TRAINED)


def main(cfg: Config) -> None:
    device = distributed.start()
    folder = pathlib.Path(cfg.checkpoint)
    if error := verify_checkpoint(folder):
        raise UserError(error)
    if pathlib.Path(cfg.output).exists():
        raise UserError(f"--output {cfg.output!r} already exists: remove it or choose another folder")
    saved = json.loads((folder / "state.json").read_text())["config"]
    flags = PolicyFlags(**{field.name: saved[field.name] for field in fields(PolicyFlags) if field.name in saved})
    policy = load_policy(saved["model"], flags, torch.device("cpu") if not flags.load_in_4bit else device)
    optimizer, _ = make_optimizer(policy, flags, 1)
    _load_tensors(folder, policy, optimizer)
    export(policy, saved["model"], cfg.output)
    print(f"wrote {'an adapter for ' + saved['model'] if flags.has_adapter else 'a model'} to {cfg.output}")


if __name__ == "__main__":
    distributed.run(main, cli.parse(Config))
