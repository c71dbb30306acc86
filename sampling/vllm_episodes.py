"""Episodes of several turns in vLLM, each turn in a request of its own.

No episode waits for another one's turn: while threads prepare prompts and let environments answer, vLLM decodes the
others. It computes only what is new in a turn. The rest is in its caches, tokens and images.
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
from common.records import Prompt
from sampling.continuation import PAUSE_EVERY
from sampling.episodes import Episode
from sampling.vllm_checks import check_expansion

THREADS = 16
GATHER = 0.2  # seconds in which turns that become ready begin together, if vLLM has nothing to do
Index = tuple[int, int]  # of a prompt, and of an episode in its group


class EpisodeLoop:
    """Runs the episodes of each prompt to their ends."""

    def __init__(
        self,
        llm: Any,
        groups: Sequence[Sequence[Episode]],
        render: Callable[[Prompt], dict],
        params: Callable[[int, int], Any],
        max_tokens: int,
    ):
        """`render` makes an `EngineInput` of a prompt. `params(i, j)` returns the parameters of an episode's next turn.

        `max_tokens`: how many tokens an episode may sample in all turns.
        """
        self.engine, self.groups, self.render, self.params = llm.llm_engine, groups, render, params
        self.max_tokens = max_tokens
        self.inputs: dict[Index, dict] = {}  # the `EngineInput` of each episode's last turn
        self.ready: SimpleQueue[Future[list[Index]]] = SimpleQueue()  # turns that threads have prepared
        self.in_threads = 0  # calls whose results have not been taken

    def run(self) -> None:
        """Run all episodes. Raises UserError if vLLM refuses a turn, and gives the others up."""
        pool = ThreadPoolExecutor(THREADS)
        try:
            for i in sorted(range(len(self.groups)), key=lambda i: -self.groups[i][0].prompt.expected_length):
                self._submit(pool, self._begin, i)
            for iteration in itertools.count():
                self._add_what_is_ready(iteration)
                if not (self.in_threads or self.engine.has_unfinished_requests()):
                    break
                for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                    if output.finished:
                        self._submit(pool, self._take_turn, *map(int, output.request_id.split()), output)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.engine.abort_request([*self.engine.output_processor.request_states], internal=True)

    def _submit(self, pool: ThreadPoolExecutor, *call: Any) -> None:
        self.in_threads += 1
        pool.submit(*call).add_done_callback(self.ready.put)

    def _add_what_is_ready(self, iteration: int) -> None:
        """Add the requests of prepared turns. If vLLM has nothing else to do, wait for some, and for others shortly.

        An iteration in which a request begins takes several times as long as one that only decodes. Therefore, requests
        are added together, every few iterations.
        """
        is_busy = self.engine.has_unfinished_requests()
        until = time.monotonic() + (0 if is_busy else GATHER)
        while self.in_threads and not (is_busy and iteration % PAUSE_EVERY):
            may_wait = max(0.0, until - time.monotonic()) if self.engine.has_unfinished_requests() else None
            try:
                turns = self.ready.get(timeout=may_wait).result()
            except Empty:
                return
            self.in_threads -= 1
            for i, j in turns:
                self._add(i, j)

    def _add(self, i: int, j: int) -> None:
        """Let vLLM sample an episode's next turn."""
        from vllm.sampling_params import RequestOutputKind

        params = self.params(i, j)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        try:
            self.engine.add_request(f"{i} {j}", self.inputs[i, j], params)
        except ValueError as error:
            raise UserError(f"{self.groups[i][j].prompt.source}: vLLM refuses a turn: {error}") from error

    def _begin(self, i: int) -> list[Index]:
        """Prepare the first turns of a group, which are the same. Return the episodes that have a turn to sample."""
        members = [(i, j) for j in range(len(self.groups[i]))]
        self.inputs |= dict.fromkeys(members, self.render(self.groups[i][0].prompt))
        return members

    def _take_turn(self, i: int, j: int, output: Any) -> list[Index]:
        """Let the environment answer a turn, and prepare the next one, unless the episode is over."""
        episode, (sampled,) = self.groups[i][j], output.outputs
        seen = replace(episode.prompt, ids=torch.cat([episode.prompt.ids, episode.trajectory.ids]))
        check_expansion(seen, output.prompt_token_ids)
        ids, logp = torch.tensor([*sampled.token_ids]), torch.tensor([*sampled.logprobs.logprobs])
        room = self.max_tokens - len(episode.logp) - len(ids)
        if not episode.step(ids, logp, sampled.finish_reason == "stop", room):
            return []
        self.inputs[i, j] = extended(self.inputs[i, j], ids.tolist(), self.render(episode.added))
        return [(i, j)]


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
