"""Which rows come when, and their prompts, made while the step before trains.

The order is an endless stream that follows from the seed alone: a place in it names a row, and so a run goes on from
any place on any number of processes.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from common import distributed
from common.distributed import partition_lpt
from common.errors import StepFailed, UserError
from common.records import Prompt, Sample
from data import Processor, encode_prompts


class PromptStream:
    """The endless shuffled stream of training prompts over `samples`, of one or several data sets."""

    def __init__(self, samples: list[Sample], processor: Processor, seed: int, weights: tuple[float, ...] = ()):
        self.samples, self.processor, self.seed, self.weights = samples, processor, seed, weights
        self.sizes = source_sizes(samples, weights)
        self.thread = ThreadPoolExecutor(1)
        texts = "".join(json.dumps([sample.prompt, sample.answer]) for sample in samples)
        self.rows_seen = {"rows": self.sizes, "rows_digest": hashlib.sha256(texts.encode()).hexdigest()[:16]}
        self.prefetched: tuple[list[int], Future[list[Prompt]]] | None = None
        self.lengths: dict[str, float] = {}  # mean completion tokens of each row when it was last drawn

    def assign_prompts(
        self, first: int, count: int, generations: int, longest: int, tensor_parallel: int = 1
    ) -> tuple[list[int], list[int]]:
        """Which of the `count` prompts from place `first` on this process samples, and their places: the share of every
        `tensor_parallel` processes, who have one engine, is expected to take as long. A row's completions are expected
        as they were the last time, those of a row that was never drawn as the mean of all, or `longest`."""
        rows = [self.row(place) for place in range(first, first + count)]
        mean = sum(self.lengths.values()) / len(self.lengths) if self.lengths else longest
        costs = [self.samples[row].tokens + generations * self.lengths.get(str(row), mean) for row in rows]
        engine, member = divmod(distributed.rank(), tensor_parallel)
        mine = partition_lpt(costs, distributed.world_size() // tensor_parallel)[engine][member::tensor_parallel]
        return mine, [first + i for i in mine]

    def record_length(self, place: int, lengths: Sequence[int]) -> None:
        """Completions of the prompt at `place` had `lengths` tokens."""
        self.lengths[str(self.row(place))] = sum(lengths) / len(lengths)

    def row(self, place: int) -> int:
        """The number of the sample at `place`."""
        return row_at(place, self.sizes, self.seed, self.weights)

    def rows(self, places: Sequence[int]) -> list[Sample]:
        """The samples at `places`."""
        return [self.samples[self.row(place)] for place in places]

    def prefetch(self, places: Sequence[int]) -> None:
        """Begin to make the prompts of `places`, beside whatever else is done until they are taken."""
        self.prefetched = list(places), self.thread.submit(encode_prompts, self.rows(places), self.processor)

    def get(self, places: Sequence[int]) -> list[Prompt]:
        """The prompts at `places`, prepared or not. All processes; raises StepFailed on every one, naming a row that
        can no longer be read."""
        if self.prefetched is None or self.prefetched[0] != list(places):
            self.prefetch(places)
        (_, future), self.prefetched = self.prefetched, None
        prompts, wrong = [], None
        try:
            prompts = future.result()
        except UserError as error:
            wrong = str(error)
        if wrong := distributed.first_error(wrong):
            raise StepFailed(wrong)
        for place, prompt in zip(places, prompts):
            prompt.expected_length = self.lengths.get(str(self.row(place)), 0.0)
        return prompts


def row_at(place: int, sizes: Sequence[int], seed: int, weights: tuple[float, ...] = ()) -> int:
    """The row at `place` of an endless shuffled stream over data sets of `sizes` rows that lie one after another.

    An epoch is as many places as there are rows. Without `weights` it goes through every row once, in a new order each
    time. With them each data set gets its share of every epoch's places, and goes through its own rows in an endless
    order of its own, so that none of them is left out for good.
    """
    epoch, index = divmod(place, sum(sizes))
    return int(_order(tuple(sizes), seed, epoch, weights)[index])


@functools.lru_cache(maxsize=2)
def _order(sizes: tuple[int, ...], seed: int, epoch: int, weights: tuple[float, ...]) -> np.ndarray:
    rows = sum(sizes)
    shuffled = np.random.default_rng([seed, epoch]).permutation(rows)
    if not weights:
        return shuffled
    ends = np.round(np.cumsum(weights) / sum(weights) * rows).astype(int)  # of each data set's share of the places
    chosen = []
    for part, (size, first, start, end) in enumerate(zip(sizes, np.cumsum([0, *sizes]), [0, *ends], ends)):
        places = range(epoch * (end - start), (epoch + 1) * (end - start))
        chosen += [first + row_at(place, (size,), seed + 1 + part) for place in places]
    return np.asarray(chosen)[shuffled]


def source_sizes(samples: list[Sample], weights: tuple[float, ...]) -> list[int]:
    """How many rows each of several mixed data sets has. Raises UserError when `weights` do not fit them."""
    parts = [sample.source_index for sample in samples]
    sizes = [parts.count(part) for part in range(max(parts) + 1)]
    if weights and len(weights) != len(sizes):
        raise UserError(f"--data_weights has {len(weights)} weights for {len(sizes)} data sets: give one for each")
    return sizes


def prompt_seed(seed: int, place: int) -> int:
    """The sampling seed of the prompt at `place` of the stream: its completions follow from it alone."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
