"""Episodes of several turns in vLLM, each turn in a request of its own.

No episode waits for another one's turn: while threads let environments answer and encode what they answer, vLLM decodes
the others. It computes only what is new in a turn. The rest is in its caches, tokens and images.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from common.errors import UserError
from common.records import Prompt, Rollout, Sampling
from parts.turns.episodes import THREADS, Episode, Episodes
from rollout import VLLMEngine
from sampling.continuation import PAUSE_EVERY
from sampling.vllm_checks import check_expansion
from sampling.vllm_loop import request_seed

GATHER = 0.2  # seconds in which turns that become ready begin together, if vLLM has nothing to do
Index = tuple[int, int]  # of a prompt, and of an episode in its group


def sample_episodes(
    episodes: Episodes, engine: VLLMEngine, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
) -> list[list[Rollout]]:
    """Sample `sampling.n` episodes of each prompt."""
    engine.check_pixels_of(prompts, seeds)
    begun = [[episodes.begin(i, prompt) for _ in range(sampling.n)] for i, prompt in enumerate(prompts)]

    def params(i: int, j: int) -> Any:
        sampled = len(begun[i][j].logp)
        return engine.params(sampling, 1, request_seed(seeds[i], j, sampled), sampling.max_tokens - sampled)

    EpisodeLoop(engine.llm, begun, engine.render, params, sampling.max_tokens, episodes.add_features).run()
    return [[episode.rollout for episode in group] for group in begun]


class EpisodeLoop:
    """Runs the episodes of each prompt to their ends."""

    def __init__(
        self,
        llm: Any,
        groups: Sequence[Sequence[Episode]],
        render: Callable[[Prompt], dict],
        params: Callable[[int, int], Any],
        max_tokens: int,
        add_features: Callable[[list[Prompt]], None] | None = None,
    ):
        """`render` makes an `EngineInput` of a prompt. `params(i, j)` returns the parameters of an episode's next turn.

        `max_tokens`: how many tokens an episode may sample in all turns. `add_features`: see `Episodes`.
        """
        self.engine, self.groups, self.render, self.params = llm.llm_engine, groups, render, params
        self.max_tokens, self.add_features = max_tokens, add_features
        self.inputs: dict[Index, dict] = {}  # the `EngineInput` of each episode's last turn
        self.answered: SimpleQueue[Future[Index | None]] = SimpleQueue()  # None: the episode is over
        self.in_threads = 0  # episodes whose answers have not been taken

    def run(self) -> None:
        """Run all episodes. Raises UserError if vLLM refuses a turn, and gives the others up."""
        pool = ThreadPoolExecutor(THREADS)
        try:
            for i in sorted(range(len(self.groups)), key=lambda i: -self.groups[i][0].prompt.expected_length):
                first = self.render(self.groups[i][0].prompt)
                for j in range(len(self.groups[i])):
                    self._add(i, j, first)
            for iteration in itertools.count():
                self._go_on(iteration)
                if not (self.in_threads or self.engine.has_unfinished_requests()):
                    break
                for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                    if output.finished:
                        self.in_threads += 1
                        i, j = map(int, output.request_id.split())
                        pool.submit(self._take_turn, i, j, output).add_done_callback(self.answered.put)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.engine.abort_request([*self.engine.output_processor.request_states], internal=True)

    def _go_on(self, iteration: int) -> None:
        """Begin the next turns of episodes that have an answer. If vLLM is idle, wait for one, and shortly for others.

        An iteration in which a request begins takes several times as long as one that only decodes. Therefore, requests
        are added together, every few iterations.
        """
        is_busy = self.engine.has_unfinished_requests()
        if is_busy and iteration % PAUSE_EVERY:
            return
        timeout, until = 0.0 if is_busy else None, 0.0
        turns: list[Index] = []
        while self.in_threads:
            try:
                answered = self.answered.get(timeout=timeout).result()
            except Empty:
                break
            self.in_threads -= 1
            turns += [answered] if answered else []
            if not is_busy:
                until = until or time.monotonic() + GATHER
                timeout = max(0.0, until - time.monotonic())
        added = [self.groups[i][j].added for i, j in turns]
        if self.add_features:
            self.add_features([prompt for prompt in added if prompt.images])
        for (i, j), prompt in zip(turns, added):
            trajectory = self.groups[i][j].trajectory
            tokens = trajectory.ids[: -len(prompt.ids)][-trajectory.turn_lengths[-1] :]
            self._add(i, j, extended(self.inputs[i, j], tokens.tolist(), self.render(prompt)))

    def _add(self, i: int, j: int, inputs: dict) -> None:
        """Let vLLM sample an episode's next turn."""
        from vllm.sampling_params import RequestOutputKind

        self.inputs[i, j], params = inputs, self.params(i, j)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        try:
            self.engine.add_request(f"{i} {j}", inputs, params)
        except ValueError as error:
            raise UserError(f"{self.groups[i][j].prompt.source}: vLLM refuses a turn: {error}") from error

    def _take_turn(self, i: int, j: int, output: Any) -> Index | None:
        """Let the environment answer a turn; return the episode's index if it has another turn."""
        episode, (sampled,) = self.groups[i][j], output.outputs
        seen = replace(episode.prompt, ids=torch.cat([episode.prompt.ids, episode.trajectory.ids]))
        check_expansion(seen, output.prompt_token_ids)
        ids, logp = torch.tensor([*sampled.token_ids]), torch.tensor([*sampled.logprobs.logprobs])
        room = self.max_tokens - len(episode.logp) - len(ids)
        return (i, j) if episode.step(ids, logp, sampled.finish_reason == "stop", room) else None


def extended(before: dict, tokens: list[int], answer: dict) -> dict:
    """Return the `EngineInput` of a turn: that of the turn before, the `tokens` sampled in it, and the answer's.

    So vLLM prepares every image once.
    """
    ids = before["prompt_token_ids"] + tokens
    joined = before | {"prompt_token_ids": ids + answer["prompt_token_ids"]}
    if answer["type"] == "multimodal":
        moved = [replace(place, offset=place.offset + len(ids)) for place in answer["mm_placeholders"]["image"]]
        joined["type"] = "multimodal"
        for name, added in (answer | {"mm_placeholders": {"image": moved}}).items():
            if name.startswith("mm_"):
                joined[name] = {"image": [*before.get(name, {"image": []})["image"], *added["image"]]}
    return joined
