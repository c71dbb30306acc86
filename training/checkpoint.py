"""Exact save and resume, and export to Hugging Face layout.

    python -m training.checkpoint --checkpoint runs/grpo/checkpoint-40 --output exported    # as a model or adapter

A checkpoint is a folder `checkpoint-STEP` with what is trained and the optimizer's state in
`torch.distributed.checkpoint` form, every process's random states, `state.json` with everything else, and
`manifest.json` with the size and hash of each file. It is written beside its place by a thread, while training goes
on from the copy on the host, flushed to disk and renamed when it is whole: a killed run never leaves a half one under
that name, and a damaged one is noticed before any of it is used.
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

from common import console, distributed
from common.distributed import partition_lpt
from common.errors import RunStopped, UserError
from common.files import flush, partial_path
from config import PolicyFlags, RunFlags
from policy.model import Policy, load_policy
from policy.optimizer import make_optimizer
from training.export import export

# What a resumed run must share. Which prompts come next, what is trained, and what is maximised; the schedule counts
# updates. Not among them: what people change on the way, such as the learning rate, β, temperature or longer answers.
MUST_MATCH = ("task", "data", "data_weights", "rows", "rows_digest", "model", "seed", "prompts_per_step")
MUST_MATCH += ("num_generations", "prompts_per_update", "num_iterations", "loss_type", "reward")
MUST_MATCH += ("lora_rank", "lora_alpha", "adapter", "load_in_4bit", "train_vision")
RUN_STATE = ("step", "position", "best", "norms", "skipped", "unscored")  # of a run, beside the lengths of its rows
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # the rest lies where the run started from
MANIFEST = "manifest.json"
SUPERSEDED_SUFFIX = ".before-resume"


@dataclass
class Config:
    """Write a checkpoint in Hugging Face layout, or as an adapter when one was trained."""

    checkpoint: str
    """The checkpoint's folder."""
    output: str
    """Where the model or adapter goes; the folder must not exist yet."""


class Checkpoints:
    """The checkpoints of a run: saved beside training, thinned out, found again."""

    def __init__(self, output: str, keep_last: int = 0, keep_best: bool = False, patience: float = 30.0):
        self.folder, self.keep_last, self.keep_best = pathlib.Path(output), keep_last, keep_best
        minutes = datetime.timedelta(minutes=patience)
        self.group = dist.new_group(backend="gloo", timeout=minutes)  # the thread's own collectives
        self.thread = ThreadPoolExecutor(1)
        self.pending: tuple[Future[None], int] | None = None  # and the step that is being written
        self.newest: int | None = None  # the step that this run can be gone on from, with nothing of it lost
        self.save_failed = False  # the last one asked for could not be written
        self.replaces = False  # the run in `output` goes: this launch's own, started again, or nothing to go on from

    def save(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        progress: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Write checkpoint-STEP while training goes on, with `last` before this returns, unless it is there; `progress`
        holds «step» and what else the caller needs back. All processes. What is wrong is said and leaves it `owed`; an
        earlier one that went wrong does not keep this one from being written."""
        self.wait()
        wrong = None
        if progress["step"] != self.newest:
            wrong = self._start(policy, optimizer, scheduler, progress)
        self.save_failed = wrong is not None
        if wrong:
            self._say(progress["step"], wrong)
        if last:
            self.wait()

    def _start(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        progress: dict[str, Any],
    ) -> str | None:
        """Begin to write; returns what is wrong already, on every process."""
        tensors = _local_share(*get_state_dict(policy, optimizer, options=TRAINED))
        if wrong := self._no_room(tensors):
            return wrong
        partial = partial_path(self.folder / f"checkpoint-{progress['step']}")
        state = progress | {"scheduler": scheduler.state_dict(), "world_size": distributed.world_size()}
        begun = self._try(lambda: _begin(partial, state))
        if wrong := begun or self._try(
            lambda: torch.save(random_states(), partial / f"random-{distributed.rank()}.pt")
        ):
            shutil.rmtree(partial, ignore_errors=True)
            return wrong
        written: list[Future] = []
        wrong = self._try(
            lambda: written.append(dcp.async_save(tensors, checkpoint_id=partial, process_group=self.group))
        )
        if written:
            work = self.thread.submit(self._finish, written[0], partial, progress["step"], progress["best"])
            self.pending = work, progress["step"]
        return wrong

    def _try(self, write: Callable[[], None]) -> str | None:
        """`write`; returns what went wrong with it on any process, the same on all of them."""
        wrong = None
        try:
            write()
        except (OSError, RuntimeError, CheckpointException) as error:  # torch's writer raises the second on a full disk
            wrong = self._why(error)
        return distributed.first_error(wrong)

    def _say(self, step: int, wrong: str) -> None:
        self.save_failed = True
        if console.is_main():
            print(f"no checkpoint of step {step}: {wrong}; {self.status()}", file=sys.stderr)

    def status(self) -> str:
        """What a run that ended now could go on from."""
        return "there is no checkpoint yet" if self.newest is None else f"checkpoint-{self.newest} is whole"

    def resume_hint(self, then: str = "goes on from it") -> str:
        """What can be done after the run has ended here."""
        if self.newest is None:
            return "there is no checkpoint"
        if self.save_failed:
            return f"checkpoint-{self.newest} is the newest: --resume goes on from it"
        return f"checkpoint-{self.newest} is whole: --resume {then}"

    def export_final(self, policy: Policy, source: str) -> None:
        """`export` to the folder «final». Raises RunStopped, naming the checkpoint to make it from, when that fails."""
        try:
            export(policy, source, f"{self.folder}/final")
        except RunStopped as error:
            newest = self.folder / f"checkpoint-{self.newest}"
            again = f"python -m training.checkpoint --checkpoint {newest} --output DIR writes it where there is room"
            why = again if self.newest is not None else "there is no checkpoint to make it from"
            raise RunStopped(f"{error}; {why}", error.status) from None

    def write_failed(self) -> bool:
        """Whether what this process is writing has gone wrong already."""
        future = self.pending[0] if self.pending else None
        return future is not None and future.done() and future.exception() is not None

    def wait(self) -> str | None:
        """Until what is being written is on disk; what is wrong with it is said, and returned on every process."""
        step = self.pending[1] if self.pending else None
        wrong = distributed.first_error(self.join_write())
        if step is not None and wrong:
            self._say(step, wrong)
        elif step is not None:
            self.newest = step
        return wrong

    def join_write(self) -> str | None:
        """As `wait`, for this process alone, when the others may be anywhere."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        future, step = pending
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 of the disk, by way of several libraries
            shutil.rmtree(partial_path(self.folder / f"checkpoint-{step}"), ignore_errors=True)
            return self._why(error)
        return None

    def _no_room(self, tensors: dict[str, Any]) -> str | None:
        """What is missing on the disk for `tensors`, before any of it is written."""
        local = [
            t._local_tensor if isinstance(t, DTensor) else t for t in tree_leaves(tensors) if isinstance(t, Tensor)
        ]
        needed = int(distributed.all_sum(torch.tensor(sum(t.numel() * t.element_size() for t in local))))
        needed += needed // 50 + 2**20  # what the format adds
        free = shutil.disk_usage(self.folder).free if console.is_main() else 0
        free = distributed.all_gather(free)[0]
        if needed <= free:
            return None
        return (
            f"a checkpoint takes {needed / 1e9:.3f} GB and {str(self.folder)!r} has {free / 1e9:.3f} GB left: "
            f"{(needed - free) / 1e9:.3f} GB are missing"
        )

    def _why(self, error: BaseException) -> str:
        found, said = _reasons(error), str(error)
        full = any(getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for e in found)
        if full or "No space left" in said:
            return f"{str(self.folder)!r} is full"
        return f"{type(found[-1]).__name__}: {str(found[-1])[:200]}"

    def _finish(self, written: Future, partial: pathlib.Path, step: int, best: dict[str, float] | None) -> None:
        """In the thread: when every process's files are there the first one seals and renames them."""
        written.result()
        dist.barrier(self.group)
        if console.is_main():
            write_manifest(partial)
            folder = self.folder / f"checkpoint-{step}"
            earlier = folder.with_name(f"{folder.name}.old")  # of the same step: whole until the new one has its place
            shutil.rmtree(earlier, ignore_errors=True)
            if folder.exists():
                folder.rename(earlier)
            partial.rename(folder)
            flush(folder.parent)
            shutil.rmtree(earlier, ignore_errors=True)
            self._thin_out(step, best)

    def _thin_out(self, written: int, best: dict[str, float] | None) -> None:
        """Of the steps up to the one just `written`, keep the last `keep_last` and the best one."""
        steps = {step: folder for step, folder in _checkpoints_by_step(self.folder).items() if step <= written}
        newest = sorted(steps)[-self.keep_last :] if self.keep_last else list(steps)
        kept = {*newest, best["step"] if self.keep_best and best else None}
        aside = _checkpoints_by_step(self.folder, SUPERSEDED_SUFFIX)
        gone = [folder for step, folder in steps.items() if step not in kept]
        for folder in gone + [folder for step, folder in aside.items() if step <= written]:
            shutil.rmtree(folder, ignore_errors=True)

    def prepare_output(self, step: int | None) -> None:
        """Make way for a run that goes on after `step`, or from the start (None): then an earlier run in `output` goes.

        Later checkpoints, which this run makes anew or which are damaged, are renamed to checkpoint-STEP.before-resume
        until it has come as far itself. All processes, when everything else is in order.
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
                aside = folder.with_name(folder.name + SUPERSEDED_SUFFIX)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def is_own(self, folder: pathlib.Path | None) -> bool:
        """Whether the checkpoint in `folder` is of the run in `output`."""
        return folder is not None and folder.resolve().parent == self.folder.resolve()

    def find(self, wanted: str | None) -> pathlib.Path | None:
        """The checkpoint to go on from: «newest», «auto» (where there is one), the folder `wanted`, or None for none.
        The same on every process.

        When torchrun has started this launch again it is the newest, whatever is `wanted`. Raises UserError when there
        is none, or the folder named is not whole. A newest one that is not whole is named and the one before is taken.
        """
        found: tuple[bool, pathlib.Path | None, str] = (False, None, "")
        if console.is_main():
            for step, folder in _checkpoints_by_step(
                self.folder, ".old"
            ).items():  # killed while a new one took its place
                if step not in _checkpoints_by_step(self.folder):
                    folder.rename(folder.with_suffix(""))
            again, begun = distributed.restarted() and self._of_this_launch(), bool(_checkpoints_by_step(self.folder))
            if begun and (again or wanted == "auto"):
                wanted = "newest"
            anew = wanted == "auto" and not (self.folder / "final").exists()
            found = (again or anew, *self._find(None if wanted == "auto" else wanted))
        self.replaces, path, wrong = distributed.all_gather(found)[0]
        if wrong:
            raise UserError(wrong)
        return path

    def _find(self, wanted: str | None) -> tuple[pathlib.Path | None, str]:
        """The checkpoint `wanted` and what is wrong."""
        if not wanted:
            return None, ""
        if wanted == "newest":
            return self._newest()
        folder = pathlib.Path(wanted)
        if (steps := _checkpoints_by_step(folder)) and not (folder / MANIFEST).exists():
            return (
                None,
                f"--resume: {wanted!r} is a run: name one of its checkpoints, {steps[max(steps)]} is the newest",
            )
        return folder, verify_checkpoint(folder) or ""

    def _of_this_launch(self) -> bool:
        about = self.folder / "config.json"
        known = json.loads(about.read_text()).get("launch") if about.is_file() else None
        return bool(set(known or []).intersection(distributed.launcher_ids()))

    def _newest(self) -> tuple[pathlib.Path | None, str]:
        steps = _checkpoints_by_step(self.folder)
        for step in sorted(steps, reverse=True):
            wrong = verify_checkpoint(steps[step])
            if wrong is None:
                return steps[step], ""
            others = "; taking the one before" if step > min(steps) else ""
            print(f"{wrong}{others}", file=sys.stderr)
        what = "no whole checkpoint" if steps else "no checkpoint"
        holds_a_run = steps or (self.folder / "metrics.jsonl").exists()
        anew = "--overwrite in its place starts anew" if holds_a_run else "leave the flag out to start anew"
        return None, f"--resume: {what} in {str(self.folder)!r}; {anew}"


def _reasons(error: BaseException) -> list[BaseException]:
    """What led to `error`, the first cause last; of one process of those that torch's checkpoints tell of."""
    found = [error]
    while error := (
        next(iter(error.failures.values()))[0]
        if isinstance(error, CheckpointException) and error.failures
        else error.__cause__ or error.__context__
    ):
        found.append(error)
    return found


def _begin(partial: pathlib.Path, state: dict[str, Any]) -> None:
    """An empty folder with `state`; the first process makes it."""
    if console.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "state.json").write_text(json.dumps(state, indent=1))


def _local_share(parameters: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    """What this process saves: its shards, and where others have the same ones, those of its part of the parameters."""
    places = (p.device_mesh for p in parameters.values() if isinstance(p, DTensor) and p.device_mesh.ndim > 1)
    if (mesh := next(places, None)) is not None:
        names = list(parameters)
        parts = partition_lpt([parameters[name].numel() for name in names], mesh.size(0))
        parameters = {names[i]: parameters[names[i]] for i in parts[mesh.get_coordinate()[0]]}
        moments = moments | {"state": {name: s for name, s in moments["state"].items() if name in parameters}}
    return {"policy": parameters, "optimizer": moments}


def _checkpoints_by_step(folder: pathlib.Path, ending: str = "") -> dict[int, pathlib.Path]:
    form = rf"checkpoint-(\d+){re.escape(ending)}"
    found = [(re.fullmatch(form, path.name), path) for path in folder.glob("checkpoint-*")]
    return {int(match[1]): path for match, path in found if match}


# --- whole or not -----------------------------------------------------------------------------------------------------


def write_manifest(folder: pathlib.Path) -> None:
    """Sizes and hashes of every file in `folder`, and of the manifest itself; all flushed to disk."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_hash, paths))
    files = {path.name: {"size": path.stat().st_size, "sha256": digest} for path, digest in zip(paths, hashes)}
    (folder / MANIFEST).write_bytes(_sealed(json.dumps({"files": files}, indent=1).encode()))
    for path in [*paths, folder / MANIFEST, folder]:
        flush(path)


def _sealed(text: bytes) -> bytes:
    return text + f"\n{hashlib.sha256(text).hexdigest()}\n".encode()


def verify_checkpoint(folder: pathlib.Path) -> str | None:
    """What is wrong with the checkpoint in `folder`; None when every byte is as it was written."""
    try:
        found = (folder / MANIFEST).read_bytes()
        text = found[:-66]  # the rest is a hash between two line breaks
        if found != _sealed(text):
            return f"{folder}: its {MANIFEST} is damaged"
        files = json.loads(text)["files"]
        for name, about in files.items():
            size = (folder / name).stat().st_size
            if size != about["size"]:
                return f"{folder}: {name} has {size} bytes where {about['size']} were written"
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(_hash, [folder / name for name in files]))
        for (name, about), found in zip(files.items(), hashes):
            if found != about["sha256"]:
                return f"{folder}: {name} is damaged: other bytes than were written"
    except (OSError, ValueError, KeyError) as error:
        return f"{folder} is not a whole checkpoint ({type(error).__name__}: {str(error)[:120]})"
    return None


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what is in one ---------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators. Sampling uses none of them: its seeds follow from
    the run's and the prompt's place; reward functions and libraries might."""
    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)}
    states["torch"] = torch.get_rng_state()
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
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
    """Put the tensors of `folder` into `policy`, `optimizer` and `scheduler`; returns the saved progress. On any number
    of processes; those that were not there before keep the random states they started with.

    Learning rate and weight decay are those of the new command, as whatever else it changes and is said. Raises
    UserError when `config` differs in what makes it the same run (SAME_RUN).
    """
    saved = json.loads((folder / "state.json").read_text())
    config = json.loads(json.dumps(config))
    was, elsewhere = saved["config"], {field.name for field in fields(RunFlags)}
    other = [name for name in config if name in was and was[name] != config[name]]  # an older one may lack some
    changed = {name: f"{name} was {was[name]}, is {config[name]}" for name in other if name not in elsewhere}
    if refused := [said for name, said in changed.items() if name in MUST_MATCH]:
        raise UserError(f"--resume: {folder} is of another run ({', '.join(refused)}): use the same or a new --output")
    if changed and console.is_main():
        print(f"going on with other settings than before: {', '.join(changed.values())}", file=sys.stderr)
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    _load_tensors(folder, policy, optimizer)
    rates = list(scheduler.base_lrs)
    scheduler.load_state_dict(saved["scheduler"] | {"base_lrs": rates})
    for group, rate, shape, own_decay in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, decay):
        group |= {"initial_lr": rate, "lr": rate * shape(scheduler.last_epoch), "weight_decay": own_decay}
    own = folder / f"random-{distributed.rank()}.pt"
    if own.is_file():
        restore_random_states(torch.load(own, weights_only=True))
    return saved


def _load_tensors(folder: pathlib.Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
    try:
        dcp.load({"policy": parameters, "optimizer": moments}, checkpoint_id=folder)
    except CheckpointException as error:
        why = str(_reasons(error)[-1]).splitlines()[0][:160]
        raise UserError(f"{folder} cannot be loaded into this model ({why}): use the flags it was made with") from None
    set_state_dict(policy, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=TRAINED)


def main(cfg: Config) -> None:
    device = distributed.start()
    folder = pathlib.Path(cfg.checkpoint)
    if wrong := verify_checkpoint(folder):
        raise UserError(wrong)
    if pathlib.Path(cfg.output).exists():
        raise UserError(f"--output {cfg.output!r} is there already: remove it or name another folder")
    saved = json.loads((folder / "state.json").read_text())["config"]
    flags = PolicyFlags(**{field.name: saved[field.name] for field in fields(PolicyFlags) if field.name in saved})
    policy = load_policy(saved["model"], flags, torch.device("cpu") if not flags.load_in_4bit else device)
    optimizer, _ = make_optimizer(policy, flags, 1)
    _load_tensors(folder, policy, optimizer)
    export(policy, saved["model"], cfg.output)
    print(f"{cfg.output}: {'an adapter over ' + saved['model'] if flags.has_adapter else 'a model'}")


if __name__ == "__main__":
    distributed.run(main, Config)
