"""The order of the training rows, and the encoding of their prompts in the background while the previous step trains.

The order is an endless stream of rows that depends only on the seed. A run can therefore resume from any position in
the stream, on any number of processes.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import distributed
from common.distributed import partition_lpt
from common.errors import StepFailed, UserError
from common.records import Prompt, Rollout, Sample
from config import Config
from data import Processor, encode_prompt, encode_prompts


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt that has been drawn from the stream and not been trained on yet."""

    position: int  # in the stream
    step: int  # number of steps that were complete when it was drawn
    row: int  # index of its row in `PromptStream.samples`
    rollouts: tuple[Rollout, ...] = ()  # its G completions so far; empty before its first round

    @property
    def is_complete(self) -> bool:
        """Whether all its completions are finished."""
        return bool(self.rollouts) and all(rollout.finished for rollout in self.rollouts)


class PromptStream:
    """The endless shuffled stream of training prompts over `samples`, which come from one or several data sets."""

    def __init__(
        self,
        samples: list[Sample],
        processor: Processor,
        seed: int,
        batch: int = 1,
        drop_last: bool = False,
        teacher: Processor | None = None,
    ):
        """`batch` is the number of prompts that are drawn at a time; for `drop_last`, see `row_at`."""
        self.samples, self.processor, self.seed, self.teacher = samples, processor, seed, teacher
        if drop_last and batch > len(samples):
            raise UserError(
                f"--drop_last drops every row: prompts_per_step is {batch}, and there are {len(samples)} rows"
            )
        self.epoch_length = epoch_length(len(samples), batch, drop_last)
        self.shuffled = functools.partial(row_at, rows=len(samples), seed=seed, batch=batch, drop_last=drop_last)
        self.thread = ThreadPoolExecutor(1)
        texts = "".join(json.dumps([*row.texts, row.answer, *filter(None, [row.system])]) for row in samples).encode()
        sources = [sample.source_index for sample in samples]
        sizes = [sources.count(source) for source in range(max(sources) + 1)]  # of the data sets
        self.fingerprint: dict[str, Any] = {"rows": sizes, "rows_digest": hashlib.sha256(texts).hexdigest()[:16]}
        self.prefetched: dict[tuple[int, int], Future[Prompt]] = {}  # by position and row
        self.lengths: dict[str, float] = {}
        """The mean completion length in tokens of each row when it was last sampled. The keys are row indices as
        text, because a checkpoint holds this dict as JSON."""
        self.rewarded: dict[str, tuple[int, float]] = {}
        """How each row was rewarded so far: number of scored completions, and mean of their rewards; keys as above."""

    def draw(self, positions: Sequence[int], step: int, cfg: Config | None = None) -> list[DrawnPrompt]:
        """Draw the prompts at `positions` after `step` steps; `ORDERS` decides which rows they are."""
        return [DrawnPrompt(position, step, ORDERS["default"](self, position, cfg)) for position in positions]

    def assign_prompts(
        self, drawn: Sequence[DrawnPrompt], generations: int, max_length: int, tensor_parallel: int = 1
    ) -> list[int]:
        """Return the indices of this process's share of the prompts in `drawn`.

        Each engine is shared by `tensor_parallel` ranks, and all engines get nearly the same number of expected tokens.
        The expected completion length of a row is the mean length of its completions when the row was last sampled.
        For a row that has not been sampled yet, it is the mean over all rows so far, or `max_length` at the start.
        """
        mean = sum(self.lengths.values()) / len(self.lengths) if self.lengths else max_length
        costs = []
        for each in drawn:
            expected = self.lengths.get(str(each.row), mean)
            tokens = sum(_expected_tokens(rollout, expected, max_length) for rollout in each.rollouts)
            costs.append(self.samples[each.row].tokens + (tokens if each.rollouts else generations * expected))
        engine, member = divmod(distributed.rank(), tensor_parallel)
        engine_prompts = partition_lpt(costs, distributed.world_size() // tensor_parallel)[engine]
        return engine_prompts[member::tensor_parallel]

    def record(self, row: int, lengths: Sequence[int], rewards: Sequence[float]) -> None:
        """Record the lengths, in tokens, and the rewards of the completions of a row; NaN: unscored."""
        self.lengths[str(row)] = sum(lengths) / len(lengths)
        count, mean = self.rewarded.get(str(row), (0, 0.0))
        if scored := [reward for reward in rewards if not math.isnan(reward)]:
            total = count + len(scored)
            self.rewarded[str(row)] = (total, mean + sum(reward - mean for reward in scored) / total)

    def rows(self, drawn: Iterable[DrawnPrompt]) -> list[Sample]:
        """Return the rows of the prompts in `drawn`."""
        return [self.samples[each.row] for each in drawn]

    def prefetch(self, drawn: Sequence[DrawnPrompt]) -> None:
        """Start encoding the prompts in `drawn` in a background thread.

        More threads would compete with the training step for the GIL: 0.2 s per step of W1 (docs/log.md).
        """
        self.prefetched = {
            (each.position, each.row): self.thread.submit(encode_prompt, row, self.processor, self.teacher)
            for each, row in zip(drawn, self.rows(drawn))
        }

    def get(self, drawn: Sequence[DrawnPrompt]) -> list[Prompt]:
        """Return the prompts in `drawn`; encode those now that were not prefetched. Call it on every process.

        Raises StepFailed on every process if any process can no longer read a row; the message names the row.
        """
        started = {key: future for key, future in self.prefetched.items() if not future.cancel()}
        self.prefetched = {}
        keys = [(each.position, each.row) for each in drawn]
        missing = [each for each, key in zip(drawn, keys) if key not in started]
        with distributed.shared_errors(StepFailed):
            encoded = iter(encode_prompts(self.rows(missing), self.processor, self.teacher))
            prompts = [started[key].result() if key in started else next(encoded) for key in keys]
        for each, prompt in zip(drawn, prompts):
            prompt.expected_length = self.lengths.get(str(each.row), 0.0)
        return prompts


def in_shuffled_order(stream: PromptStream, position: int, cfg: Config | None) -> int:
    """Return the row, an index in `stream.samples`, of the prompt at `position` in the stream; see `row_at`."""
    return stream.shuffled(position)


ORDERS: dict[str, Callable[[PromptStream, int, Config | None], int]] = {"default": in_shuffled_order}
"""The entry "default" may be replaced. It may depend on how rows were rewarded so far (`stream.rewarded`), and on
nothing else that changes."""


def _expected_tokens(rollout: Rollout, expected: float, max_length: int) -> float:
    """Return how many more tokens `rollout` is expected to get.

    Until `rollout` has half of its `expected` length, this is the rest of that length. After that, it is as many tokens
    as `rollout` already has, within `max_length`: a completion that is long already is likely to become much longer.
    """
    length = len(rollout.ids)
    return 0.0 if rollout.finished else min(max(expected - length, length), max_length - length)


def epoch_length(rows: int, batch: int, drop_last: bool) -> int:
    """Return the number of positions in an epoch over `rows` rows; for `drop_last`, see `row_at`."""
    return rows - (rows % batch if drop_last else 0)


def row_at(position: int, rows: int, seed: int, batch: int = 1, drop_last: bool = False) -> int:
    """Return the row at `position` in an endless shuffled stream over `rows` rows.

    An epoch has as many positions as there are rows, and visits every row once, in a new order. The stream is read
    `batch` positions at a time. The last batch of an epoch is filled up with other rows of the next epoch, so that no
    batch has a row twice. With `drop_last`, an incomplete last batch is dropped.
    """
    epoch, index = divmod(position, epoch_length(rows, batch, drop_last))
    return int(_epoch_order(rows, seed, epoch, 1 if drop_last else batch)[index])


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int, batch: int) -> np.ndarray:
    """Return the rows of an epoch in an order in which its first batch repeats none of the previous epoch's last rows.

    The order depends on that of the previous epoch, and so on, back to an epoch that begins with a new batch.
    """
    order = np.empty(0, dtype=int)
    period = batch // math.gcd(rows, batch) if batch <= rows else 1
    for each in range(epoch - epoch % period, epoch + 1):
        begun = each * rows % batch  # number of the previous epoch's rows in this epoch's first batch
        previous, order = order, np.random.default_rng([seed, each]).permutation(rows)
        if begun and batch <= rows:
            first = order[~np.isin(order, previous[-begun:])][: batch - begun]
            order = np.concatenate([first, order[~np.isin(order, first)]])
    return order
