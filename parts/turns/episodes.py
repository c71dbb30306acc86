"""Episodes of several turns: the model samples a turn, an environment answers it, and so on (docs/turns.md).

`Episodes` begins an `Episode` for each completion. A sampler hands every turn to its `then`, which lets the environment
answer in a worker process, and returns the request for the next turn. Nothing is tokenized twice: the trajectory is
what was sampled and, in between, what the chat template writes for the answers.
"""

import functools
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import rewards
from common import console, distributed
from common.errors import CallFailed
from common.records import TAG, Output, Prompt, Request, Rollout, Sample, Trajectory, Turn
from data import Processor, digest_of, expand_images, prompt_position_ids
from grading.calls import ROOT, start_workers
from inputs.images import fit_image, read_source
from parts.turns.pictures import add_features, add_vision, pixel_table
from parts.turns.replies import encode_reply, reply_role
from policy.model import Policy, trains_vision, vision_parameters
from sampling.hf_engine import NOTHING, continued_position_ids

MAX_IMAGES = 8  # in an answer
MAX_REPORTS = 10  # how many different reasons for failed calls a process prints
TAKE_TURN = f"{ROOT}/parts/turns/worker.py:take_turn"


class Episodes:
    """The environment of a run, its workers, and the rows that its episodes are about."""

    def __init__(
        self,
        samples: Sequence[Sample],
        processor: Processor,
        policy: Policy | None = None,
    ):
        """`policy` computes the features of later pictures, if its vision tower is frozen; else samplers do."""
        self.samples, self.processor = samples, processor
        self.add_features: Callable[[list[Prompt]], None] | None = None
        self.table = None
        if policy and vision_parameters(policy.model) and not trains_vision(policy.model):
            self.table = pixel_table(processor)
            self.add_features = functools.partial(add_features, policy, self.table)
        self.environment, self.reply_role = processor.environment, reply_role(processor)
        self.workers = _workers(self.environment.function)
        self.computing = threading.Lock()  # threads that compete for Python's own lock hold the sampler up
        self.begun: list[Episode] = []  # in the order of the sampler's requests

    def begin(self, row: int, request: Request, old: Rollout) -> Request:
        """Begin an episode about `samples[row]`, or resume that of `old`. Returns the request for its turn."""
        self.begun.append(Episode(self, self.samples[row], request, old))
        return self.begun[-1].request

    def then(self, number: int, output: Output) -> Request | None:
        """Let an episode take the turn that has ended; return the request for its next one (`Engine.generate`)."""
        with self.computing:
            return self.begun[number].then(output)

    def end(self, number: int, output: Output) -> Rollout:
        """Return what was sampled in an episode, given the `output` of its last turn."""
        return self.begun[number].rollout(output)

    def ask(self, state: bytes, fields: dict[str, Any]) -> Any:
        """Let the environment answer a turn. Returns CallFailed if it raises, is too slow or answers with too much."""
        call: dict[str, Any] = {"function": self.environment.function, "state": state, "fields": fields}
        call |= {"max_text": self.environment.max_seen * self.processor.longest_token}
        call |= {"max_reward": rewards.MAX_REWARD / self.environment.max_turns}
        self.computing.release()
        try:
            (answer,) = self.workers.call_all(TAKE_TURN, rewards.REWARD_TIMEOUT, [call])
        finally:
            self.computing.acquire()
        return answer


_reported: set[str] = set()


def _report(reason: str) -> None:
    """Print why a call has failed: each reason once, and at most `MAX_REPORTS`, because they may quote the model."""
    if len(_reported) < MAX_REPORTS and reason not in _reported:
        _reported.add(reason)
        console.log(f"note: a call of --env failed, and the model was told: {reason}")


@functools.cache
def _workers(function: str) -> Any:
    """Return the workers that call an environment's `function`, file.py:function."""
    processes = max(2, min(8, (os.cpu_count() or 1) // distributed.local_world_size()))
    return start_workers(processes, [function, TAKE_TURN], may_hang=False)


class Episode:
    """One completion of several turns."""

    def __init__(self, episodes: Episodes, sample: Sample, request: Request, old: Rollout):
        """`request` asks for the completion, of which an earlier step may have sampled `old`."""
        self.episodes, self.sample, self.prompt = episodes, sample, request.prompt
        self.trajectory = self._empty_trajectory()
        self.reward, self.text = old.env_reward, old.text
        self.is_over = self.is_truncated = False  # truncated: it was cut off by the number of turns, or of tokens
        if old.trajectory and old.trajectory.turns:
            turns, lengths = [*old.trajectory.turns], [*old.trajectory.turn_lengths]
            self.trajectory = replace(old.trajectory, turns=turns, turn_lengths=lengths)
            request = replace(request, prompt=self._joined(self.prompt, replace(self.trajectory)))
        sampled = sum(self.trajectory.turn_lengths)  # the rest is of a turn that was interrupted
        self.logp, self.logp_before = old.sampling_logp[:sampled], old.sampling_logp[sampled:]
        self.pixels: dict[str, Tensor] = {}  # of all pictures, once it is over, for a teacher
        self.max_tokens = request.max_tokens + len(old.ids)  # of all turns
        self.request = replace(request, tokens=old.ids[sampled:], add_features=episodes.add_features)

    def _empty_trajectory(self) -> Trajectory:
        prompt, none, token = self.prompt, NOTHING.ids, self.episodes.processor.image_token_id
        positions, state = prompt.position_ids[:, :0], pickle.dumps({})
        mask = none.bool()
        return Trajectory(none, [], positions, opening=prompt.opening, image_token=token, loss_mask=mask, state=state)

    def then(self, output: Output) -> Request | None:
        """Take the turn that has ended with `output`; return the request for the next one, if there is one."""
        ids, logp = torch.cat([self.request.tokens, output.ids]), torch.cat([self.logp_before, output.logp])
        room = self.max_tokens - len(self.logp) - len(ids)
        self.is_over = not self.step(ids, logp, output.reason == "stop", room)
        if self.is_over:
            if self.episodes.environment.has_teacher and self.trajectory.images:
                self.pixels = self.episodes.processor.vision_inputs(self.trajectory.images)
            return None
        self.logp_before = NOTHING.logp
        turn = replace(
            self.added, ids=torch.cat([ids, self.added.ids]), engine_ids=ids.tolist() + self.added.engine_ids
        )
        prompt = self._joined(self.request.prompt, turn)
        self.request = replace(self.request, prompt=prompt, tokens=NOTHING.ids, max_tokens=room)
        return self.request

    def _joined(self, before: Prompt, added: Prompt) -> Prompt:
        """Return what the model sees in a turn: the prompt `before`, and what was `added` to it."""
        vision = {"image_grid_thw": added.vision["image_grid_thw"]} if "image_grid_thw" in added.vision else {}
        positions = prompt_position_ids(self.episodes.processor.skeleton, added.ids, vision)
        return replace(
            before,
            ids=torch.cat([before.ids, added.ids]),
            engine_ids=before.engine_ids + added.engine_ids,
            position_ids=torch.cat([before.position_ids, before.position_ids.max() + 1 + positions], dim=1),
            vision={},  # the tower's inputs are those of its parts
            image_token=added.image_token,
            extends=(before, added),
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
        before, failed_before = (trajectory.state, self.reward), trajectory.num_failed
        content = self._ask() if stopped else None
        self.is_truncated = not stopped or content is not None
        can_go_on = room > 0 and len(trajectory.turns) < 2 * self.episodes.environment.max_turns - 1
        # If the model itself has sampled an image token, a sampler would look for a picture there.
        if content is None or not can_go_on or trajectory.image_token in ids:
            return False
        problem = self._see(content, last)
        if problem and trajectory.num_failed == failed_before:  # otherwise, the answer already says what went wrong
            trajectory.state, self.reward = before
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
        answer = self.episodes.ask(self.trajectory.state, fields)
        if isinstance(answer, CallFailed):
            content = self._failed(str(answer))
        else:
            content, reward, self.trajectory.state = answer
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
        left = self.episodes.environment.max_seen - len(self.prompt.ids) - int((~trajectory.loss_mask).sum())
        if len(ids) > left:
            return f"the answer has {len(ids)} tokens, and max_prompt_length leaves room for {left}"
        trajectory.opening = opening
        trajectory.turns.append(Turn("tool", [*fitted]))
        self._extend(ids, engine_ids, is_sampled=False)
        trajectory.images = [*trajectory.images, *images]
        unplaced, token = torch.empty(0), trajectory.image_token
        source = self.prompt.source
        self.added = Prompt(torch.tensor(ids), engine_ids, unplaced, images=images, source=source, image_token=token)
        add_vision(self.added, processor, self.episodes.table)
        return None

    def _extend(self, ids: list[int], engine_ids: list[int], is_sampled: bool) -> None:
        """Add tokens to the trajectory."""
        trajectory = self.trajectory
        trajectory.ids = torch.cat([trajectory.ids, torch.tensor(ids)])
        trajectory.engine_ids = trajectory.engine_ids + engine_ids
        trajectory.loss_mask = torch.cat([trajectory.loss_mask, torch.full((len(ids),), is_sampled)])

    def rollout(self, output: Output = NOTHING) -> Rollout:
        """Return what was sampled in all turns, with the whole trajectory. `output`: of a turn that has not ended."""
        trajectory, prompt, last = self.trajectory, self.prompt, self.request.prompt
        following = len(prompt.ids) + len(trajectory.ids) - len(last.ids)
        trajectory.position_ids = continued_position_ids(last, following)[:, len(prompt.ids) :]
        parts = [part for part in last.parts[1:] if part.images]
        if parts and all(part.features is not None for part in parts):
            trajectory.features = torch.cat([part.features for part in parts])
        elif parts:
            trajectory.vision = {name: torch.cat([part.vision[name] for part in parts]) for name in parts[0].vision}
            trajectory.image_digest = digest_of(trajectory.images)
        if self.pixels:
            trajectory.for_teacher = replace(trajectory, features=None, vision=self.pixels)
        ids, logps = [trajectory.ids[trajectory.loss_mask]], [self.logp]
        if not self.is_over:
            ids += [self.request.tokens, output.ids]
            logps += [self.logp_before, output.logp]
        return Rollout(
            torch.cat(ids),
            torch.cat(logps),
            self.is_truncated,
            self.text,
            self.is_over,
            trajectory=trajectory,
            env_reward=self.reward,
        )
