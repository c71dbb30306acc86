"""Trajectories that wait for a later step (`--oversample`), in a checkpoint too: plain data, with pictures as PNG."""

import io
from dataclasses import replace
from typing import Any

from PIL import Image

from common.records import Rollout, Turn
from data import Processor
from inputs.images import decode_image
from parts.turns.pictures import add_vision


def parked(rollout: Rollout) -> Rollout:
    """Return `rollout` with each picture of its trajectory as a PNG file, and without what is made of pictures."""
    if not rollout.trajectory:
        return rollout
    turns = [Turn(role, [_as_png(part) for part in content]) for role, content in rollout.trajectory.turns]
    light = replace(rollout.trajectory, turns=turns, images=[], vision={}, features=None, for_teacher=None)
    return replace(rollout, trajectory=light)


def restored(rollout: Rollout, processor: Processor) -> Rollout:
    """Undo `parked`."""
    if not rollout.trajectory:
        return rollout
    turns = [
        Turn(role, [part if isinstance(part, str) else decode_image(part) for part in content])
        for role, content in rollout.trajectory.turns
    ]
    images = [part for turn in turns for part in turn.content if isinstance(part, Image.Image)]
    trajectory = replace(rollout.trajectory, turns=turns, images=images)
    add_vision(trajectory, processor)
    return replace(rollout, trajectory=trajectory)


def _as_png(part: Any) -> Any:
    if not isinstance(part, Image.Image):
        return part
    file = io.BytesIO()
    part.save(file, "PNG", compress_level=1)
    return file.getvalue()
