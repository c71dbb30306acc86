"""Episodes of several turns: the model samples a turn, an environment answers it, and so on (docs/turns.md).

`Episodes` begins an `Episode` for each completion. A sampler hands every turn to `Episode.step`, which lets the
environment answer in a worker process, and continues with the tokens that it returns. Nothing is tokenized twice: the
trajectory is what was sampled and, in between, what the chat template writes for the answers.
"""

import functools
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import rewards
from common import console, distributed
from common.errors import CallFailed
from common.records import TAG, Prompt, Rollout, Sample, Trajectory, Turn
from data import Processor, digest_of, expand_images, prompt_position_ids
from grading.calls import ROOT, killable_workers
from inputs import images as image_files
from inputs.images import fit_image, read_source
from parts.turns.replies import encode_reply, reply_role

MAX_IMAGES = 8  # in an answer
THREADS = 16  # episodes that ask their environment at the same time
MAX_REPORTS = 10  # different reasons why calls have failed that a process prints
TAKE_TURN = f"{ROOT}/parts/turns/worker.py:take_turn"


class Episodes:
    """The environment of a run, its workers, and the rows that its episodes are about."""

    def __init__(
        self,
        samples: Sequence[Sample],
        processor: Processor,
        add_features: Callable[[list[Prompt]], None] | None = None,
    ):
        """`add_features` adds the features of a frozen vision tower to prompts; None: samplers compute them."""
        self.samples, self.processor, self.add_features = samples, processor, add_features
        self.environment, self.reply_role = processor.environment, reply_role(processor)
        self.workers = _workers(self.environment.function)

    def begin(self, row: int, prompt: Prompt) -> "Episode":
        """Begin an episode about `samples[row]`, which was encoded as `prompt`."""
        return Episode(self, self.samples[row], prompt)

    def ask(self, state: bytes, fields: dict[str, Any]) -> Any:
        """Let the environment answer a turn. Returns CallFailed if it raises, is too slow or answers with too much."""
        call: dict[str, Any] = {"function": self.environment.function, "state": state, "fields": fields}
        call |= {"max_text": self.environment.max_seen * self.processor.longest_token}
        call |= {"max_megapixels": image_files.max_megapixels}
        call |= {"max_reward": rewards.MAX_REWARD / self.environment.max_turns}
        (answer,) = self.workers.call_all(TAKE_TURN, rewards.REWARD_TIMEOUT, [call])
        return answer


_reported: set[str] = set()


def _report(reason: str) -> None:
    """Print why a call has failed, once, and not too many of the reasons: they may quote the model."""
    if len(_reported) < MAX_REPORTS and reason not in _reported:
        _reported.add(reason)
        console.log(f"note: a call of --env failed, and the model was told: {reason}")


@functools.cache
def _workers(function: str) -> Any:
    """Return the workers that call an environment's `function`, file.py:function."""
    processes = max(2, min(8, (os.cpu_count() or 1) // distributed.local_world_size()))
    return killable_workers(processes, [function, TAKE_TURN])


class Episode:
    """One completion of several turns."""

    def __init__(self, episodes: Episodes, sample: Sample, prompt: Prompt):
        self.episodes, self.sample, self.prompt = episodes, sample, prompt
        self.state = pickle.dumps({})  # of the environment
        self.reward, self.text = 0.0, ""
        self.is_truncated = False  # whether it was cut off by the number of turns, or of tokens
        self.logp = torch.empty(0)  # of the sampled tokens
        self.added = prompt  # what the last step has added to the trajectory for the model to see, as a prompt
        self.pictures: list[Prompt] = []  # all that steps have added with images
        none = torch.empty(0, dtype=torch.long)
        positions, sampled = prompt.position_ids[:, :0], none.bool()
        self.trajectory = Trajectory(
            none, [], positions, opening=prompt.opening, image_token=episodes.processor.image_token_id, sampled=sampled
        )

    def step(self, ids: Tensor, logp: Tensor, stopped: bool, room: int) -> bool:
        """Take a turn of the model: its tokens `ids` (L,) and their log-probabilities. Return whether another follows.

        The trajectory then ends with what the environment has answered. `stopped`: whether the turn ended with a stop
        token; `room`: how many tokens may still be sampled.
        """
        trajectory, last = self.trajectory, int(ids[-1])
        self.text = trajectory.opening + self.episodes.processor.tokenizer.decode(ids[:-1] if stopped else ids)
        self.logp = torch.cat([self.logp, logp])
        trajectory.turns.append(Turn("assistant", [self.text]))
        trajectory.turn_lengths.append(len(ids))
        self._extend(ids.tolist(), ids.tolist(), is_sampled=True)
        before, failed_before = (self.state, self.reward), trajectory.num_failed
        content = self._ask() if stopped else None
        self.is_truncated = not stopped or content is not None
        # A sampler that takes images would take a sampled placeholder for one.
        can_go_on = room > 0 and len(trajectory.turns) < 2 * self.episodes.environment.max_turns - 1
        if content is None or not can_go_on or trajectory.image_token in ids:
            return False
        problem = self._see(content, last)
        if problem and trajectory.num_failed == failed_before:  # otherwise, the answer already says what went wrong
            self.state, self.reward = before
            problem = self._see(self._failed(problem), last)
        self.is_truncated = problem is not None
        return problem is None

    def _ask(self) -> list[str | Image.Image] | None:
        """Return what the environment answers to the last turn; None if the episode is over."""
        coordinates = self.episodes.processor.family.coordinates
        extents = [(coordinates, coordinates) if coordinates else image.size for image in self.prompt.images]
        fields = {name: value for name, value in self.sample.fields.items() if value is not None}
        fields |= {"question": self.sample.prompt.replace(TAG, "").strip(), "answer": self.sample.answer}
        images = [read_source(source) for source in self.sample.images]  # the worker decodes them
        fields |= {"text": self.text, "images": images, "extents": extents}
        answer = self.episodes.ask(self.state, fields)
        if isinstance(answer, CallFailed):
            content = self._failed(str(answer))
        else:
            content, reward, self.state = answer
            self.reward += reward
        self.trajectory.num_calls += content is not None
        return content

    def _failed(self, reason: str) -> list[str | Image.Image]:
        """Count an answer that only says what went wrong, and return it, without control tokens."""
        _report(reason)
        self.trajectory.num_failed += 1
        for token in self.episodes.processor.control_tokens:
            reason = reason.replace(token, "…")
        return [f"error: {reason}"]

    def _see(self, content: list[str | Image.Image], last: int) -> str | None:
        """Add `content`, the environment's answer to a turn that ended with the token `last`, to the trajectory.

        Returns why it cannot be added; None if it was.
        """
        processor, trajectory = self.episodes.processor, self.trajectory
        num_images = sum(isinstance(part, Image.Image) for part in content)
        if num_images and not processor.preparation:
            return "the model is text-only, and the answer has a picture"
        if num_images > MAX_IMAGES:
            return f"{num_images} pictures are too many"
        try:
            fitted = [
                part.encode(errors="replace").decode()  # no tokenizer takes half of a surrogate pair
                if isinstance(part, str)
                else fit_image(part, processor.preparation.fit)
                for part in content
            ]
            images = [part for part in fitted if isinstance(part, Image.Image)]
            engine_ids, opening = encode_reply(self.sample, Turn(self.episodes.reply_role, [*fitted]), last, processor)
        except ValueError as error:
            return str(error)
        ids = expand_images(engine_ids, images, processor)
        left = self.episodes.environment.max_seen - len(self.prompt.ids) - int((~trajectory.sampled).sum())
        if len(ids) > left:
            return f"the answer has {len(ids)} tokens, and max_prompt_length leaves room for {left}"
        trajectory.opening = opening
        trajectory.turns.append(Turn("tool", [*fitted]))
        self._extend(ids, engine_ids, is_sampled=False)
        trajectory.images = [*trajectory.images, *images]
        unplaced = torch.empty(0)  # samplers that need `position_ids` ask for them
        self.added = Prompt(torch.tensor(ids), engine_ids, unplaced, images, source=self.prompt.source)
        if images:
            self.added.vision, self.added.image_digest = processor.vision_inputs(images), digest_of(images)
            self.added.image_token = trajectory.image_token
            self.pictures.append(self.added)
        return None

    def _extend(self, ids: list[int], engine_ids: list[int], is_sampled: bool) -> None:
        """Add tokens to the trajectory."""
        trajectory = self.trajectory
        trajectory.ids = torch.cat([trajectory.ids, torch.tensor(ids)])
        trajectory.engine_ids = trajectory.engine_ids + engine_ids
        trajectory.sampled = torch.cat([trajectory.sampled, torch.full((len(ids),), is_sampled)])

    def position_ids(self) -> Tensor:
        """Return the position ids (R, F) of the trajectory, by the model's own rule over the whole sequence."""
        prompt, trajectory = self.prompt, self.trajectory
        whole = torch.cat([prompt.ids, trajectory.ids])
        is_image = torch.zeros(len(whole), dtype=torch.bool)
        is_image[torch.cat([prompt.image_indices, len(prompt.ids) + trajectory.image_indices])] = True
        visions = [part.vision for part in (prompt, *self.pictures)]
        grids = [vision["image_grid_thw"] for vision in visions if "image_grid_thw" in vision]
        vision = {"image_grid_thw": torch.cat(grids)} if grids else {}
        return prompt_position_ids(self.episodes.processor.skeleton, whole, vision, is_image)[:, len(prompt.ids) :]

    @property
    def rollout(self) -> Rollout:
        """What was sampled in all turns, with all of the trajectory, once the episode is over."""
        trajectory, parts = self.trajectory, self.pictures
        trajectory.position_ids = self.position_ids()
        if parts and all(part.features is not None for part in parts):
            trajectory.features = torch.cat([part.features for part in parts])
        elif parts:
            trajectory.vision = {name: torch.cat([part.vision[name] for part in parts]) for name in parts[0].vision}
            trajectory.image_digest = digest_of(trajectory.images)
        ids, end = trajectory.ids[trajectory.sampled], self.is_truncated
        return Rollout(ids, self.logp, end, self.text, trajectory=trajectory, env_reward=self.reward)
