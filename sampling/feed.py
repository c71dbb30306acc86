"""Sampling episodes with a KV cache: what a sequence sees between two turns is fed to it token by token.

The sequences of a batch do not wait for each other's turns. In each decoding step, a sequence either samples a token or
gets the next one of its environment's answer, so that the cache has all of them and nothing is computed twice. The
batch waits only while environments answer: otherwise, the rounding of its results would depend on how long they take.

Shapes: B sequences, R position axes (3 with M-RoPE, otherwise 1).
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from sampling.episodes import Episode

THREADS = 16  # episodes that ask their environment at the same time


class Fed(NamedTuple):
    """A token that a sequence gets, with its position (R,) and, if it is an image's, its features."""

    token: int
    position: Tensor
    features: Tensor | None


class Feed:
    """The episodes of a batch, and the tokens that its sequences still have to get."""

    def __init__(self, episodes: Sequence[Episode], features_of: Callable[[dict[str, Tensor]], Tensor]):
        """`features_of` returns the image features (image tokens, features) for inputs of the vision tower."""
        self.episodes, self.features_of = episodes, features_of
        self.waiting: list[deque[Fed]] = [deque() for _ in episodes]
        self.turns: list[list[tuple[int, float]]] = [[] for _ in episodes]  # tokens of the turn that is being sampled

    def insert(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
        """Return `token` (B,) and `position` (R, B) or (B,) with the next token of each sequence that gets one.

        Also returns which those are, (B,), and the features of those that are an image's, with their indices.
        """
        is_fed = torch.tensor([bool(each) for each in self.waiting], device=token.device)
        token, position = token.clone(), position.clone()
        features: dict[int, Tensor] = {}
        for b, queue in enumerate(self.waiting):
            if queue:
                fed = queue.popleft()
                token[b] = fed.token
                position[..., b] = fed.position.to(position) if position.ndim > 1 else fed.position[0]
                if fed.features is not None:
                    features[b] = fed.features
        vision = {"features": torch.stack(list(features.values()))} if features else {}
        return token, position, is_fed, vision, torch.tensor(list(features), dtype=torch.long, device=token.device)

    def take(self, token: Tensor, logp: Tensor, running: Tensor, stopped: Tensor, room: Tensor) -> Tensor:
        """Record the tokens that the sequences in `running` have sampled; return which are over, of those `stopped`.

        Those that have ended a turn ask their environment. `room`: how many tokens each may still sample. All are (B,).
        """
        ended = []
        for b, (is_running, *pair) in enumerate(zip(running.tolist(), token.tolist(), logp.tolist())):
            if is_running:
                self.turns[b].append(tuple(pair))
                if stopped[b] or not room[b]:
                    ended.append(b)
        with ThreadPoolExecutor(THREADS) as pool:
            go_on = list(pool.map(lambda b: self._end_turn(b, bool(stopped[b]), int(room[b])), ended))
        over = stopped.clone()
        for b, goes_on in zip(ended, go_on):
            over[b] = not goes_on
            self.waiting[b] += self._answer(self.episodes[b]) if goes_on else ()
        return over

    def _end_turn(self, b: int, stopped: bool, room: int) -> bool:
        """Let an episode take the turn that its sequence has sampled; return whether it goes on."""
        ids, logps = zip(*self.turns[b])
        self.turns[b] = []
        return self.episodes[b].step(torch.tensor(ids), torch.tensor(logps), stopped, room)

    def _answer(self, episode: Episode) -> list[Fed]:
        """Return the tokens that an episode's last step has added for the model to see."""
        added = episode.added
        features = iter(self.features_of(added.vision) if added.vision else ())
        image_token = episode.trajectory.image_token
        return [
            Fed(token, position, next(features) if token == image_token else None)
            for token, position in zip(added.ids.tolist(), added.position_ids.T)
        ]
