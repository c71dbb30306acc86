"""What travels between the rooms: a row (`Sample`), what the model reads (`Prompt`), a completion (`Rollout`), a group.

Shapes: S prompt tokens, L completion tokens, R rows of positions (3 with M-RoPE, else 1).
"""

from __future__ import annotations

import math
import pathlib
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

if TYPE_CHECKING:  # the service reads rows, too, and must not take seconds to import torch
    from torch import Tensor

TAG = "<image>"  # where an image goes in a prompt; the tokenizer's own placeholder never appears in data


Folder = pathlib.Path | zipfile.Path


class Stored(Protocol):
    """A picture in a table on disk: read only when it is needed."""

    def read(self) -> dict: ...


ImageSource = str | Folder | bytes | dict | Image.Image | Stored


@dataclass
class Sample:
    """One row of a data set."""

    prompt: str
    """the question, with one <image> tag for each image"""
    answer: str
    """the gold answer"""
    images: list[ImageSource]
    """where each image is, or the image itself; decoded when it is needed"""
    source: str
    """file and row, for messages"""
    fields: dict[str, Any] = field(default_factory=dict)
    """every other column, handed to the rewards by name"""
    system: str | None = None
    """the row's own system prompt, in place of the task's"""
    source_index: int = 0
    """which of several mixed data sets it is from"""
    tokens: int = 0
    """of its prompt, images expanded; 0 until it has been checked with a processor"""


@dataclass
class Prompt:
    """A sample as the sampler and the trainer take it."""

    ids: Tensor
    """(S,) token ids, images expanded: the trainer's"""
    engine_ids: list[int]
    """the same with one placeholder for each image: the sampler's"""
    positions: Tensor
    """(R, S) positions as the model counts them: 3 rows with M-RoPE, else 1"""
    images: list[Image.Image] = field(default_factory=list)
    """fitted, in order"""
    vision: dict[str, Tensor] = field(default_factory=dict)
    """what the vision tower takes: `pixel_values` (patches, patch values), `image_grid_thw` (images, 3); empty without
    images"""
    source: str = ""
    """the sample's file and row, for messages"""
    features: Tensor | None = None
    """(image tokens, features) what a frozen vision tower makes of the images, on the host; see `model.look`"""
    image_token: int = -1
    """the id that stands for an image in `ids`"""
    image_digest: bytes = b""
    """a digest of the fitted images: the same for the same pictures"""
    expected_length: float = 0.0
    """tokens expected of a completion; a sampler that cannot take all prompts at once begins with the longest"""


@dataclass
class Rollout:
    """One completion, and what the step learns about it on the way."""

    ids: Tensor
    """(L,) token ids, the stop token included when one was sampled"""
    sampling_logp: Tensor
    """(L,) log-probability of each token under the distribution it was drawn from, temperature and top-p included"""
    truncated: bool = False
    """it ran into the length limit before a stop token"""
    text: str = ""
    """the decoded tokens, without the stop token"""
    rewards: dict[str, float] = field(default_factory=dict)
    """each reward by its name, NaN without a verdict"""
    reward: float = math.nan
    """their weighted sum; NaN: no verdict, left out of its group"""
    raw_reward: float = math.nan
    """that sum before the overlong penalty"""
    advantage: float = 0.0
    weight: float = 0.0
    """of each of its tokens in the loss, from `token_weights`"""
    old_logp: Tensor | None = None
    """(L,) under the policy that sampled it, when that is no longer the policy"""
    ref_logp: Tensor | None = None
    """(L,) under the reference, when there is a KL term"""
    has_image: bool = False
    """its prompt has one"""


@dataclass
class Group:
    """A prompt and its completions, or some of them."""

    prompt: Prompt
    rollouts: list[Rollout]
    group_index: int = 0
    """the prompt's place in the step"""
    sample: Sample | None = None
    """the row it comes from"""

    @property
    def tokens(self) -> int:
        return len(self.prompt.ids) + sum(len(rollout.ids) for rollout in self.rollouts)
