"""Data classes shared by all packages: a data row (`Sample`), an encoded `Prompt`, a completion (`Rollout`), a `Group`.

Shapes: S prompt tokens, L completion tokens, R rows of position ids (3 with M-RoPE, else 1).
"""

from __future__ import annotations

import math
import pathlib
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

if TYPE_CHECKING:  # the service reads rows too, and importing torch would delay its start by seconds
    from torch import Tensor

TAG = "<image>"  # marks an image in a data set's prompt; replaced by the tokenizer's own placeholder


Folder = pathlib.Path | zipfile.Path


class Stored(Protocol):
    """An image in a table on disk, read only when it is needed."""

    def read(self) -> dict: ...


ImageSource = str | Folder | bytes | dict | Image.Image | Stored


@dataclass
class Sample:
    """One row of a data set."""

    prompt: str
    """The question, with one `<image>` tag per image."""
    answer: str
    """The gold answer."""
    images: list[ImageSource]
    """The images as paths or contents; an image is decoded only when it is needed."""
    source: str
    """The file and row that the sample comes from, for messages."""
    fields: dict[str, Any] = field(default_factory=dict)
    """All other columns; the rewards receive them by name."""
    system: str | None = None
    """The row's own system prompt, which replaces the task's system prompt."""
    source_index: int = 0
    """Index of the data set that the row comes from, when several data sets are mixed."""
    tokens: int = 0
    """Prompt length in tokens, with images expanded; 0 until the row has been checked with a processor."""


@dataclass
class Prompt:
    """A sample, encoded for the sampler and the trainer."""

    ids: Tensor
    """(S,) token ids for the trainer, with images expanded."""
    engine_ids: list[int]
    """The same token ids for the sampler, with one placeholder per image."""
    positions: Tensor
    """(R, S) position ids of the model."""
    images: list[Image.Image] = field(default_factory=list)
    """The images in order, resized for the model."""
    vision: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the vision tower: `pixel_values` (patches, patch values), `image_grid_thw` (images, 3); empty without
    images."""
    source: str = ""
    """The file and row that the sample comes from, for messages."""
    features: Tensor | None = None
    """(image tokens, features) cached output of a frozen vision tower, in host memory; see
    `policy.model.cache_image_features`."""
    image_token: int = -1
    """The token id of image tokens in `ids`."""
    image_digest: bytes = b""
    """A hash of the resized images; identical images have the same hash."""
    expected_length: float = 0.0
    """Expected completion length in tokens. If the sampler cannot take all prompts at once, it starts with those that
    have the longest expected completions."""


@dataclass
class Rollout:
    """One completion and everything that a step computes for it."""

    ids: Tensor
    """(L,) token ids, including the stop token when one was sampled."""
    sampling_logp: Tensor
    """(L,) log-probability of each token under the distribution that it was drawn from, after temperature and top-p."""
    truncated: bool = False
    """Whether the completion reached the length limit before a stop token."""
    text: str = ""
    """The decoded tokens, without the stop token."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by name; NaN for a reward that returned no verdict."""
    reward: float = math.nan
    """Weighted sum of the rewards. NaN excludes the completion from its group."""
    raw_reward: float = math.nan
    """The weighted sum before the overlong penalty."""
    advantage: float = 0.0
    """Advantage of the completion within its group."""
    weight: float = 0.0
    """Weight of each token in the loss, as returned by `token_weights`."""
    old_logp: Tensor | None = None
    """(L,) log-probabilities under the policy that sampled the completion; only if a step makes several updates."""
    ref_logp: Tensor | None = None
    """(L,) log-probabilities under the reference model; only if there is a KL term."""
    has_image: bool = False
    """Whether the prompt has an image."""


@dataclass
class Group:
    """A prompt with some or all of its completions."""

    prompt: Prompt
    rollouts: list[Rollout]
    group_index: int = 0
    """Index of the prompt within the step."""
    sample: Sample | None = None
    """The row that the prompt comes from."""

    @property
    def tokens(self) -> int:
        """Total length in tokens of the prompt and its completions; the prompt is counted once."""
        return len(self.prompt.ids) + sum(len(rollout.ids) for rollout in self.rollouts)
