"""What a resumed run compares with its checkpoint: settings, and the files that it starts from."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from common import console
from common.console import hide_credentials
from common.errors import UserError
from common.files import model_files
from config import RunFlags
from training.run_folder import MANIFEST

# Settings that must stay the same when a run is resumed: the order of the rows, the trained parameters and the number
# of updates depend on them, and nobody changes `loss_type`, `reward` or `env` within a run on purpose. Other settings,
# such as the learning rate or β, may change; the changes are printed.
ROW_SETTINGS = ("task", "rows", "rows_digest", "seed", "drop_last", "prompts_per_step", "num_generations")
ADAPTER_SETTINGS = ("lora_rank", "lora_alpha", "lora_experts", "adapter", "load_in_4bit")
POLICY_SETTINGS = ("model", "train_vision", "train_router", *ADAPTER_SETTINGS)
UPDATE_SETTINGS = ("prompts_per_update", "num_iterations", "loss_type", "reward", "env")
MUST_MATCH = ROW_SETTINGS + POLICY_SETTINGS + UPDATE_SETTINGS


def check_settings(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Print the settings that have changed. Raise UserError if one of them is in `MUST_MATCH`."""
    new = json.loads(hide_credentials(json.dumps(new)))
    ignored = {field.name for field in fields(RunFlags)} - {"eval_data", "eval_every"}
    changes = {
        name: f"{name} was {old.get(name)}, is {value}"
        for name, value in new.items()
        if name not in ignored and not is_same_setting(old.get(name), value)
    }
    if conflicts := [change for name, change in changes.items() if name in MUST_MATCH]:
        raise UserError(
            f"--resume: {folder} belongs to another run ({', '.join(conflicts)}): "
            "use the same settings, or a new --output without --resume"
        )
    if changes:
        console.log(f"settings changed since the checkpoint: {', '.join(changes.values())}")


def is_same_setting(old: Any, new: Any) -> bool:
    """Return whether a saved setting equals a new one, or is the same path or URL in another spelling."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return old == new
    is_same_path = os.path.exists(new) and os.path.realpath(old) == os.path.realpath(new)
    return is_same_path or old == hide_credentials(new)


def note_newer_files(folder: Path, cfg: Any) -> None:
    """Print which files that a run with the flags `cfg` reads are newer than its checkpoint in `folder`.

    They may have changed. From them, a resumed run takes frozen weights, reference, teacher, prompts and rewards.
    """
    named = [getattr(cfg, name, None) for name in ("model", "adapter", "teacher", "template", "verifier_template")]
    named += [reward.partition(":")[0] for reward in getattr(cfg, "reward", ())]
    written = (folder / MANIFEST).stat().st_mtime
    if newer := [name for name in dict.fromkeys(named) if name and _last_change(Path(name)) > written]:
        console.log(f"newer than the checkpoint, so perhaps changed: {', '.join(newer)}")


def _last_change(path: Path) -> float:
    """Return when a file, or one of a model's files in a folder, was last changed; 0 if there is none."""
    files = [path] if path.is_file() else model_files(path)
    return max((file.stat().st_mtime for file in files), default=0.0)
