"""Sampling episodes with a KV cache: what a sequence sees between two turns is fed to it token by token.

The sequences of a batch do not wait for each other's turns. In each decoding step, a sequence either samples a token or
gets the next one of its environment's answer, so that the cache has all of them and nothing is computed twice. The
batch waits only while environments answer: otherwise, the rounding of its results would depend on how long they take.

Shapes: B sequences, R position axes (3 with M-RoPE, otherwise 1).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packing import vision_inputs
from parts.turns.episodes import THREADS, Episode


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

    def insert(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return `token` (B,) and `position` (R, B) or (B,) with the next token of each sequence that gets one.

        Also returns which those are, (B,), and the images among them, as `next_token_logits` takes them.
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
        places = torch.tensor(list(features), dtype=torch.long, device=token.device)
        return token, position, is_fed, {"vision": vision, "image_tokens": places}

    def take(self, token: Tensor, logp: Tensor, running: Tensor, stopped: Tensor, room: Tensor) -> Tensor:
        """Record the tokens that the sequences in `running` have sampled; return which are over, of those `stopped`.

        Those that have ended a turn ask their environment. `room`: how many tokens each may still sample. All are (B,).
        """
        ended = []
        columns = (each.tolist() for each in (running, token, logp, stopped, room))
        for b, (is_running, *pair, has_stopped, has_room) in enumerate(zip(*columns)):
            if is_running:
                self.turns[b].append(tuple(pair))
                if has_stopped or not has_room:
                    ended.append(b)
        if not ended:
            return stopped
        with ThreadPoolExecutor(THREADS) as pool:
            go_on = list(pool.map(lambda b: self._end_turn(b, bool(stopped[b]), int(room[b])), ended))
        over = stopped.clone()
        answered = [b for b, goes_on in zip(ended, go_on) if goes_on]
        over[ended] = True
        over[answered] = False
        for b, fed in zip(answered, self._answers([self.episodes[b] for b in answered])):
            self.waiting[b] += fed
        return over

    def _end_turn(self, b: int, stopped: bool, room: int) -> bool:
        """Let an episode take the turn that its sequence has sampled; return whether it has another one."""
        ids, logps = zip(*self.turns[b])
        self.turns[b] = []
        return self.episodes[b].step(torch.tensor(ids), torch.tensor(logps), stopped, room)

    def _answers(self, episodes: list[Episode]) -> Iterator[list[Fed]]:
        """Yield the tokens that each episode's last step has added for the model to see."""
        vision = vision_inputs([episode.added for episode in episodes])
        features = iter(self.features_of(vision) if vision else ())
        for episode in episodes:
            tokens, image_token = episode.added.ids.tolist(), episode.trajectory.image_token
            positions = episode.position_ids()[:, -len(tokens) :].T
            yield [Fed(t, where, next(features) if t == image_token else None) for t, where in zip(tokens, positions)]
