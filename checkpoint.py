"""Exact save and resume, and export to Hugging Face layout.

    python checkpoint.py --checkpoint runs/grpo/checkpoint-40 --output exported    # as a model or adapter

A checkpoint is a folder `checkpoint-STEP` with what is trained and the optimizer's state in
`torch.distributed.checkpoint` form, every process's random states, `state.json` with everything else, and
`manifest.json` with the size and hash of each file. It is written beside its place by a thread, while training goes
on from the copy on the host, flushed to disk and renamed when it is whole: a killed run never leaves a half one under
that name, and a damaged one is noticed before any of it is used.
"""

import errno
import hashlib
import json
import os
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
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer
from transformers.utils import cached_file

import cli
import parallel
from cli import RunStopped, UserError
from lora import adapter_tensors, has_adapter, write_adapter
from model import Policy, PolicyFlags, full_weights, load_model, load_policy, make_optimizer, saved_dtype

# What a resumed run must share: it decides which prompts come next.
SAME_RUN = ("task", "data", "data_weights", "rows", "model", "seed", "prompts_per_step", "num_generations")
SAME_RUN += ("lora_rank", "lora_alpha", "adapter", "load_in_4bit")  # what is trained
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # the rest lies where the run started from
MANIFEST = "manifest.json"


@dataclass
class Config:
    """Write a checkpoint in Hugging Face layout, or as an adapter when one was trained."""

    checkpoint: str
    """The checkpoint's folder."""
    output: str
    """Where the model or adapter goes; the folder must not exist yet."""


class Checkpoints:
    """The checkpoints of a run: saved beside training, thinned out, found again."""

    def __init__(self, output: str, keep_last: int = 0, keep_best: bool = False):
        self.folder, self.keep_last, self.keep_best = pathlib.Path(output), keep_last, keep_best
        self.group = dist.new_group(backend="gloo")  # the thread's own collectives
        self.thread = ThreadPoolExecutor(1)
        self.pending: tuple[Future[None], pathlib.Path] | None = None  # and the folder being written

    def save(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        progress: dict[str, Any],
    ) -> str | None:
        """Begin to write checkpoint-STEP; `progress` holds «step» and what else the caller needs back. All processes.

        Returns what is wrong, with this checkpoint or the one before it, and what to do; None when nothing is.
        """
        wrong = self.wait()
        parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
        tensors = {"policy": parameters, "optimizer": moments}
        wrong = wrong or self._no_room(tensors)
        if wrong:
            return wrong
        folder = self.folder / f"checkpoint-{progress['step']}"
        partial = folder.with_suffix(".partial")
        state = progress | {"scheduler": scheduler.state_dict(), "world_size": parallel.world_size()}
        begun = self._try(lambda: _begin(partial, state))
        if wrong := begun or self._try(lambda: torch.save(random_states(), partial / f"random-{parallel.rank()}.pt")):
            shutil.rmtree(partial, ignore_errors=True)
            return wrong
        written = dcp.async_save(tensors, checkpoint_id=partial, process_group=self.group)
        self.pending = self.thread.submit(self._finish, written, partial, folder), partial
        return None

    def _try(self, write: Callable[[], None]) -> str | None:
        """`write`; returns what went wrong with it on any process, the same on all of them."""
        wrong = None
        try:
            write()
        except (OSError, RuntimeError) as error:  # torch's writer of archives raises the latter on a full disk
            wrong = self._why(error)
        return next(filter(None, parallel.gather_from_all(wrong)), None)

    def wait(self) -> str | None:
        """Until what is being written is on disk; returns what is wrong with it, on every process."""
        return next(filter(None, parallel.gather_from_all(self.settle())), None)

    def settle(self) -> str | None:
        """As `wait`, for this process alone, when the others may be anywhere."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        future, partial = pending
        try:
            future.result()
        except Exception as error:  # noqa: BLE001 of the disk, by way of several libraries
            shutil.rmtree(partial, ignore_errors=True)
            return self._why(error)
        return None

    def _no_room(self, tensors: dict[str, Any]) -> str | None:
        """What is missing on the disk for `tensors`, before any of it is written."""
        local = [
            t._local_tensor if isinstance(t, DTensor) else t for t in tree_leaves(tensors) if isinstance(t, Tensor)
        ]
        needed = int(parallel.all_sum(torch.tensor(sum(t.numel() * t.element_size() for t in local))))
        needed += needed // 50 + 2**20  # what the format adds
        free = shutil.disk_usage(self.folder).free if parallel.is_main() else 0
        free = parallel.gather_from_all(free)[0]
        if needed <= free:
            return None
        return (
            f"a checkpoint takes {needed / 1e9:.3f} GB and {str(self.folder)!r} has {free / 1e9:.3f} GB left: "
            f"{(needed - free) / 1e9:.3f} GB are missing"
        )

    def _why(self, error: BaseException) -> str:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, OSError):
            inner = inner.__cause__ or inner.__context__
        full = getattr(inner, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        return f"{str(self.folder)!r} is full" if full else f"{type(error).__name__}: {str(error)[:200]}"

    def _finish(self, written: Future, partial: pathlib.Path, folder: pathlib.Path) -> None:
        """In the thread: when every process's files are there the first one seals and renames them."""
        written.result()
        dist.barrier(self.group)
        if parallel.is_main():
            write_manifest(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            _flush(folder.parent)
            self._thin_out()

    def _thin_out(self) -> None:
        """Remove what is older than the last `keep_last`, but the best one."""
        steps = _steps(self.folder)
        newest = sorted(steps)[-self.keep_last :] if self.keep_last else list(steps)
        best = json.loads((steps[max(steps)] / "state.json").read_text()).get("best") or {}
        kept = {*newest, best.get("step") if self.keep_best else None}
        for step, folder in steps.items():
            if step not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def find(self, wanted: str | None) -> pathlib.Path | None:
        """The checkpoint to go on from: «newest», the folder `wanted`, or None for none. The same on every process.

        Raises UserError when there is none, or the folder named is not whole. A newest one that is not whole is named
        and the one before is taken.
        """
        if not wanted and parallel.restarted() and _steps(self.folder) and self._of_this_launch():
            wanted = "newest"
        if not wanted:
            return None
        found: tuple[pathlib.Path | None, str] = (None, "")
        if parallel.is_main():
            found = (
                self._newest() if wanted == "newest" else (pathlib.Path(wanted), problem(pathlib.Path(wanted)) or "")
            )
        path, wrong = parallel.gather_from_all(found)[0]
        if wrong or path is None:
            raise UserError(
                wrong or f"--resume: no checkpoint in {str(self.folder)!r}; leave the flag out to start anew"
            )
        return path

    def _of_this_launch(self) -> bool:
        about = self.folder / "config.json"
        return about.is_file() and json.loads(about.read_text()).get("launch") == parallel.launch()

    def _newest(self) -> tuple[pathlib.Path | None, str]:
        steps = _steps(self.folder)
        for step in sorted(steps, reverse=True):
            wrong = problem(steps[step])
            if wrong is None:
                return steps[step], ""
            others = "; taking the one before" if step > min(steps) else ""
            print(f"{wrong}{others}", file=sys.stderr)
        damaged = f"--resume: no whole checkpoint in {str(self.folder)!r}; leave the flag out to start anew"
        return None, damaged if steps else ""


def _begin(partial: pathlib.Path, state: dict[str, Any]) -> None:
    """An empty folder with `state`; the first process makes it."""
    if parallel.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "state.json").write_text(json.dumps(state, indent=1))


def _steps(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    return {int(match[1]): path for match, path in found if match}


# --- whole or not -----------------------------------------------------------------------------------------------------


def write_manifest(folder: pathlib.Path) -> None:
    """Sizes and hashes of every file in `folder`, and of the manifest itself; all flushed to disk."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_hash, paths))
    files = {path.name: {"size": path.stat().st_size, "sha256": digest} for path, digest in zip(paths, hashes)}
    text = json.dumps({"files": files}, indent=1)
    (folder / MANIFEST).write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    for path in [*paths, folder / MANIFEST, folder]:
        _flush(path)


def problem(folder: pathlib.Path) -> str | None:
    """What is wrong with the checkpoint in `folder`; None when every byte is as it was written."""
    try:
        text, _, digest = (folder / MANIFEST).read_text().rstrip("\n").rpartition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
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


def _flush(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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

    Learning rate and weight decay are those of the new command. Raises UserError when `config` differs in what decides
    which prompts come next.
    """
    saved = json.loads((folder / "state.json").read_text())
    config = json.loads(json.dumps(config))
    changed = [f"{name} was {saved['config'][name]}" for name in SAME_RUN if saved["config"][name] != config[name]]
    if changed:
        raise UserError(f"--resume: {folder} is of another run ({', '.join(changed)}): use the same or a new --output")
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    _load_tensors(folder, policy, optimizer)
    rates = list(scheduler.base_lrs)
    scheduler.load_state_dict(saved["scheduler"] | {"base_lrs": rates})
    for group, rate, shape, own_decay in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, decay):
        group |= {"initial_lr": rate, "lr": rate * shape(scheduler.last_epoch), "weight_decay": own_decay}
    own = folder / f"random-{parallel.rank()}.pt"
    if own.is_file():
        restore_random_states(torch.load(own, weights_only=True))
    return saved


def _load_tensors(folder: pathlib.Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
    dcp.load({"policy": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(policy, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=TRAINED)


def export(policy: Policy, source: str, folder: str) -> None:
    """Write what was trained: an adapter in PEFT layout, to be loaded over `source`; or the whole model in Hugging Face
    layout, in the dtype `source` was saved in, with its tokenizer and processor, for `from_pretrained` and vLLM.

    Written beside its place and renamed. All processes. Raises RunStopped when it could not be written.
    """
    target = pathlib.Path(folder)
    partial = target.with_suffix(".partial")
    try:
        _export(policy, source, target, partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunStopped(
            f"{folder!r} could not be written ({str(error)[:200]}); checkpoints are whole: "
            "python checkpoint.py --checkpoint DIR --output DIR writes it from one of them",
            1,
        ) from None


def _export(policy: Policy, source: str, target: pathlib.Path, partial: pathlib.Path) -> None:
    if parallel.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if has_adapter(policy.model):
        tensors = adapter_tensors(policy.model)
        if parallel.is_main():
            write_adapter(policy.model, tensors, source, partial)
    else:
        _write_model(policy, source, partial)
    if parallel.is_main():
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    parallel.wait_for_all()


def _write_model(policy: Policy, source: str, folder: pathlib.Path) -> None:
    model = load_model(source, saved_dtype(source)) if parallel.is_main() else None
    own = dict(model.named_parameters()) if model is not None else {}
    for name, weight in full_weights(policy):  # one whole weight at a time
        if model is not None:
            own.pop(name).data.copy_(weight)
    if model is not None:
        if own:
            raise RuntimeError(f"the policy has no {sorted(own)[0]} to export")
        model.save_pretrained(folder)
        copy_processor(source, folder)


def copy_processor(source: str, folder: pathlib.Path) -> None:
    """The tokenizer, chat template and image settings of `source`, for whoever loads `folder`."""
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if settings is not None:
            shutil.copy(settings, folder)


def main(cfg: Config) -> None:
    device = parallel.start()
    folder = pathlib.Path(cfg.checkpoint)
    if wrong := problem(folder):
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
    cli.run(main, Config)
