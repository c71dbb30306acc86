"""Data classes that travel between the packages.

A row of a data set is a `Sample`; once encoded, it is a `Prompt`. A completion goes through three stages: sampled
(`Rollout`), scored (`Rollout` and `Rewards` in a `ScoredGroup`), and prepared for an update (`Completion` in a
`Group`). The classes of all three stages are frozen. With an environment (docs/turns.md), a completion is what the
model sampled in all turns, and its `Trajectory` also has what the model saw in between.

Shapes: S prompt tokens, L completion tokens, F tokens of a trajectory, R position axes (3 with M-RoPE, else 1).
"""

from __future__ import annotations

import math
import pathlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from PIL import Image

if TYPE_CHECKING:  # the service reads rows too, and importing torch would delay its start by seconds
    import datasets
    from torch import Tensor

TAG = "<image>"  # marks an image in a text
AnyPath = pathlib.Path | zipfile.Path  # of a file or a folder, on disk or in a ZIP


@dataclass(frozen=True)
class Cell:
    """An image in a table on disk, read only when it is needed."""

    table: datasets.Dataset
    row: int
    column: str
    index: int | None  # index in the cell's list of images; None if the cell holds a single image
    locate: Callable[[str], AnyPath]  # returns where an image is, given its path in the cell

    def read(self) -> bytes | AnyPath | None:
        """Read the image's encoded bytes, or its path if the cell has no bytes."""
        image = self.table[self.row][self.column][0]
        image = (image if self.index is None else image[self.index]).as_py()
        if not isinstance(image, dict):
            return image
        has_path = image.get("bytes") is None and image.get("path")
        return self.locate(str(image["path"])) if has_path else image.get("bytes")

    def __str__(self) -> str:
        return f"in column '{self.column}'" + (f", number {self.index + 1}" if self.index is not None else "")


ImageSource: TypeAlias = AnyPath | bytes | dict | Image.Image | Cell  # decoded only when needed; a str is a text


class Turn(NamedTuple):
    """One turn of a prompt."""

    role: str  # "system", "user", "assistant" or "tool"
    content: list[str | ImageSource | None]  # texts and images, in order; None: an image that is still to be found

    @property
    def text(self) -> str:
        """The text of the turn, with one `<image>` tag per image."""
        return "".join(piece if isinstance(piece, str) else TAG for piece in self.content)


@dataclass
class Sample:
    """One row of a data set."""

    turns: list[Turn]  # the user's and the assistant's; the last one is the question
    answer: str  # the gold answer
    source: str  # the file and row that the sample comes from, for messages
    fields: dict[str, Any] = field(default_factory=dict)  # all other columns; the rewards receive them by name
    system: str | None = None  # the row's own system prompt, which replaces the task's system prompt
    source_index: int = 0  # index of the data set that the row comes from, when several data sets are mixed
    tokens: int = 0  # prompt length, with images expanded; 0 until the row has been checked with a processor
    responses: list[str] = field(default_factory=list)  # the answers as rows have them, with reasoning: for sft.py
    teacher_images: list[ImageSource] = field(default_factory=list)  # what a teacher sees in place of the images

    @property
    def texts(self) -> list[str]:
        """The text of each turn, with one `<image>` tag per image."""
        return [turn.text for turn in self.turns]

    @property
    def prompt(self) -> str:
        """The question, which is the text of the last turn."""
        return self.texts[-1]

    @property
    def images(self) -> list[ImageSource]:
        """The images of all turns, in order."""
        return [piece for turn in self.turns for piece in turn.content if not isinstance(piece, str)]

    @property
    def for_teacher(self) -> Sample:
        """The row with `teacher_images`, if it has any, in the places of the images."""
        images = iter(self.teacher_images or self.images)
        turns = [
            Turn(role, [piece if isinstance(piece, str) else next(images) for piece in content])
            for role, content in self.turns
        ]
        return replace(self, turns=turns)


@dataclass
class Prompt:
    """A sample, encoded for the sampler and the trainer."""

    ids: Tensor  # (S,) token ids for the trainer, with images expanded
    engine_ids: list[int]  # the same token ids for the sampler, with one placeholder per image
    position_ids: Tensor  # (R, S)
    opening: str = ""
    """The end of the prompt, from a `<think>` or `<answer>` that the chat template has opened there. The text of a
    completion begins with it, so that rewards see the whole block."""
    images: list[Image.Image] = field(default_factory=list)  # in order, resized for the model
    vision: dict[str, Tensor] = field(default_factory=dict)
    """The inputs of the vision tower, as `policy.families` names them; empty without images. The first dimension of
    each counts patches, tiles or images, so that the inputs of several prompts can be concatenated."""
    source: str = ""  # the file and row that the sample comes from, for messages
    features: Tensor | None = None
    """(image tokens, features) cached output of a frozen vision tower, in host memory; see
    `policy.model.cache_image_features`."""
    image_token: int = -1  # the token id of image tokens in `ids`
    image_digest: bytes = b""  # a hash of the resized images; identical images have the same hash
    for_teacher: Prompt | None = None  # the prompt as the teacher sees it, if there is one
    expected_length: float = 0.0
    """Expected completion length in tokens. If the sampler cannot take all prompts at once, it starts with those that
    have the longest expected completions."""
    extends: tuple[Prompt, Prompt] | None = None
    """In a later turn: the prompt of the turn before, and what was added, so that no picture is prepared twice."""

    @property
    def image_indices(self) -> Tensor:
        """The indices in `ids` of the image tokens."""
        return (self.ids == self.image_token).nonzero()[:, 0]

    @property
    def parts(self) -> list[Prompt]:
        """The prompts that it consists of, each with its images; only itself, unless it `extends` another one."""
        return [*self.extends[0].parts, self.extends[1]] if self.extends else [self]


@dataclass
class Trajectory(Prompt):
    """What follows a prompt in an episode of several turns: all tokens (F,), and the images that the model saw.

    `opening` is that of the last turn.
    """

    loss_mask: Tensor = field(kw_only=True)
    """(F,) bool: True for tokens that the model sampled, on which the loss trains; False for those that it only saw."""
    turns: list[Turn] = field(default_factory=list)  # the model's turns and, between them, what it saw
    turn_lengths: list[int] = field(default_factory=list)  # how many tokens the model sampled in each of its turns
    state: bytes = b""  # of the environment, pickled
    for_teacher: Trajectory | None = None  # the trajectory as the teacher sees it, if that differs
    num_calls: int = 0  # how often the environment answered
    num_failed: int = 0  # how many of these answers only said what went wrong

    @property
    def image_indices(self) -> Tensor:
        """The indices in `ids` of the image tokens. A placeholder that the model has sampled stands for no image."""
        return ((self.ids == self.image_token) & ~self.loss_mask).nonzero()[:, 0]


@dataclass(frozen=True)
class Sampling:
    """How the completions of each prompt are sampled."""

    n: int  # number of completions per prompt
    max_tokens: int  # maximum length of a completion in tokens
    temperature: float = 1.0  # sampling temperature; 0 is greedy decoding
    top_p: float = 1.0  # sample only from the fewest tokens whose total probability is at least this


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that a sampler must accept."""

    tokens: int  # maximum number of tokens in a prompt plus its completion
    images: int  # maximum number of images in a prompt


@dataclass(frozen=True)
class Request:
    """A completion to sample, or the rest of one.

    Its random numbers depend on `seed`, on `index`, and on how many tokens of the completion were sampled before:
    `Sampling.max_tokens` − `max_tokens`. In `HFEngine`, they continue the numbers of these tokens.
    """

    prompt: Prompt  # with turns, everything before the current turn
    tokens: Tensor  # (L,) what the completion already has after `prompt`
    seed: int
    index: int
    max_tokens: int  # how many tokens it may get at most
    add_features: Callable[[list[Prompt]], None] | None = None
    """Adds the features of a frozen vision tower to the last part of each prompt, for many requests at once."""


@dataclass(frozen=True)
class Output:
    """What a sampler has added to a request."""

    ids: Tensor  # (L,) the sampled tokens, with the stop token
    logp: Tensor  # (L,) the log-probability of each under the distribution that it was drawn from
    reason: str | None = None  # "stop": it ends with a stop token; "length": it has `max_tokens`; None: interrupted


@dataclass(frozen=True)
class Rollout:
    """A completion as it was sampled."""

    ids: Tensor  # (L,) token ids, including the stop token when one was sampled; with turns, those of all turns
    sampling_logp: Tensor
    """(L,) log-probability of each token under the distribution that it was drawn from, after temperature and top-p."""
    truncated: bool = False
    """Whether the length limit came before a stop token or, with turns, a limit came before the end of the episode."""
    text: str = ""  # `Prompt.opening` and the decoded tokens, without the stop token; with turns, of the last turn
    finished: bool = True  # False: a later step continues it (parts/partial.py)
    tokens_by_step: dict[int, int] = field(default_factory=dict)
    """With partial rollouts, the number of tokens that were sampled in each step, in order."""
    num_stale: int = 0  # with partial rollouts, the number of leading tokens that policies of earlier steps sampled
    trajectory: Trajectory | None = None  # with an environment
    env_reward: float = 0.0  # the sum of what the environment gave for the turns

    def prepared(self, advantage: float | Tensor, token_weight: float) -> Completion:
        """Return the completion for an update, with its advantage, or one for each token, and the weight of a token."""
        return Completion(
            self.ids, self.sampling_logp, advantage, token_weight, self.num_stale, trajectory=self.trajectory
        )


@dataclass(frozen=True)
class Rewards:
    """The rewards of one completion. A NaN in `total` marks an unscored completion, excluded from its group."""

    total: float = math.nan  # weighted sum of the rewards
    raw: float = math.nan  # the weighted sum before the overlong penalty
    parts: dict[str, float] = field(default_factory=dict)  # each reward by name; NaN if it gave none, or failed
    spans: tuple[Span, ...] = ()  # parts of the completion that have rewards of their own


@dataclass(frozen=True)
class Span:
    """A part of a completion with rewards of its own, such as a step of a solution."""

    start: int  # index of its first character in the text that rewards see; once gathered, of its first token
    end: int  # exclusive
    rewards: Rewards  # those of the completion, with this part's own values in place of the completion's


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of several groups, of all processes. Unscored completions are NaN."""

    total: Tensor  # (groups, G) weighted sums of the rewards
    raw: Tensor  # (groups, G) the same before the overlong penalty
    parts: dict[str, Tensor]  # (groups, G) each reward by name
    spans: list[list[tuple[Span, ...]]] = field(default_factory=list)  # of each completion, in tokens


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt with its sampled completions and their rewards."""

    sample: Sample  # the row that the prompt comes from
    prompt: Prompt
    rollouts: list[Rollout]  # the G completions of the prompt
    rewards: list[Rewards]  # the rewards of each completion
    index: int  # index of the prompt within the step


@dataclass(frozen=True)
class Completion:
    """A completion prepared for an update."""

    ids: Tensor  # (L,) token ids
    sampling_logp: Tensor  # (L,) log-probabilities under the distribution it was sampled from
    advantage: float | Tensor = 0.0  # advantage of the completion within its group, or (L,) of each of its tokens
    token_weight: float = 0.0  # weight of each of its tokens in the loss, from `grpo.token_weights`
    num_stale: int = 0  # number of leading tokens that the policies of earlier steps sampled
    trainer_logp: Tensor | None = None
    """(L,) the trainer's log-probabilities before the step, without dropout; see `Updater.with_logprobs`."""
    ref_logp: Tensor | None = None  # (L,) log-probabilities under the reference model, if there is a KL term
    teacher_logp: Tensor | None = None  # (L,) log-probabilities under the teacher, if there is one
    trajectory: Trajectory | None = None  # with an environment; the tensors above cover only the sampled tokens

    @property
    def tokens(self) -> int:
        """Length in tokens, with those that the model only saw."""
        return len(self.ids if self.trajectory is None else self.trajectory.ids)

    @property
    def image_tokens(self) -> int:
        """Number of tokens of the images that the model saw in later turns."""
        return 0 if self.trajectory is None else len(self.trajectory.image_indices)


@dataclass(frozen=True)
class Group:
    """A prompt with all or some of its completions, prepared for an update."""

    prompt: Prompt
    completions: list[Completion]
    index: int = 0  # index of the prompt within the step

    @property
    def tokens(self) -> int:
        """Length of the prompt and its completions in tokens; the prompt counts once."""
        return self.prompt.ids.numel() + sum(completion.tokens for completion in self.completions)

    @property
    def image_tokens(self) -> int:
        """Number of image tokens in the prompt and its completions."""
        return len(self.prompt.image_indices) + sum(completion.image_tokens for completion in self.completions)
