"""A short path through vLLM's scheduler for iterations in which every request decodes one token.

vLLM plans each iteration from scratch, request by request, and reports each token separately: several milliseconds of
Python for 256 sequences, more than the GPU takes for the iteration. But most iterations of a rollout repeat the one
before: the same requests, one more token each. `DecodeScheduler` keeps such requests as a batch. It collects their
tokens in lists of its own, and touches a request only if it needs another block of the KV cache, has sampled a stop
token or reaches its maximum length. Before anything else can happen (waiting requests start, a request is aborted,
memory runs short), the batch is dissolved: its requests get the tokens they have sampled, and vLLM's own code takes
over until a batch can be formed again.

    vLLM's own code -> _form_batch -> _schedule_decode, _record_tokens, ... -> _dissolve_batch -> vLLM's own code -> ...

Waiting requests start several at a time, and only while blocks stay free for the running ones, which leaves a few
slots empty for a while. So a request may run later than with vLLM's scheduler, but apart from the GPU's rounding it
samples the same completion.

vLLM schedules an iteration before it has the tokens of the iteration before (`AsyncScheduler`). Tokens that were
scheduled before a batch was formed or dissolved, and arrive afterwards, are handled by vLLM's own code.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

ADMITTED_TOGETHER = 1 / 32  # waiting requests start when this share of the slots is free


@dataclass
class Member:
    """A request of a batch, and what it has sampled in it. The numbers are as of when the batch was formed."""

    request: Request
    num_computed: int  # number of tokens whose keys and values have been computed, or will be by an earlier iteration
    num_outputs: int  # number of tokens that have been sampled, or will be by an earlier iteration
    tokens_left: int  # number of tokens that it may still sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def output(self, **end: Any) -> EngineCoreOutput:
        """Return its new tokens, and how it has ended, for vLLM's frontend."""
        ids, logprobs = np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32)
        no_ranks = np.zeros(len(ids), np.int64)  # nobody asks for them
        logprobs_lists = LogprobsLists(ids[:, None], logprobs[:, None], no_ranks)
        return EngineCoreOutput(self.request.request_id, self.tokens, logprobs_lists, **end)


class Batch:
    """Requests that decode one token per iteration.

    A request leaves `active` when its last token is scheduled, and `members` when it has ended.
    """

    def __init__(self, members: list[Member], block_size: int):
        """`block_size`: a request needs more blocks if its number of computed tokens is a multiple of this."""
        self.block_size = block_size
        params = members[0].request.sampling_params
        self.stop = {*(params.stop_token_ids or ()), params.eos_token_id}
        self.scheduled = 0  # number of iterations so far
        self.pending: deque[SchedulerOutput] = deque()  # iterations whose tokens have not arrived
        self.members = {member.request.request_id: member for member in members}
        self.ending_at = {member.tokens_left for member in members}  # iterations after which a request is done
        self._set_active(self.members)

    def _set_active(self, active: dict[str, Member]) -> None:
        self.active = active
        self.num_scheduled_tokens = dict.fromkeys(active, 1)
        # iteration modulo `block_size` -> indices of active members
        self.needs_block_at: dict[int, list[int]] = defaultdict(list)
        for index, member in enumerate(active.values()):
            self.needs_block_at[-member.num_computed % self.block_size].append(index)

    def count_iteration(self) -> None:
        """Count an iteration that has been scheduled. Later ones leave out the members whose last token it samples."""
        self.scheduled += 1
        if self.scheduled in self.ending_at:
            self._set_active({name: m for name, m in self.active.items() if m.tokens_left > self.scheduled})

    def remove(self, names: Collection[str]) -> None:
        """Forget these members, which have ended."""
        self.members = {name: member for name, member in self.members.items() if name not in names}
        self._set_active({name: member for name, member in self.active.items() if name not in names})


class DecodeScheduler(AsyncScheduler):
    """vLLM's scheduler, with a short path for requests that only decode. See above."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        LogprobsProcessor._update_sample_logprobs = extend_logprobs  # every request of `rollout.py` has flat_logprobs
        self.batch: Batch | None = None
        self.unsent: list[EngineCoreOutput] = []  # tokens of dissolved batches, for vLLM's frontend
        # Block sizes of the KV cache groups in which a running request can need another block. The states of linear
        # attention have one block per request, whose size is the maximum length of a request.
        sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        self.growing = [size for size in sizes if size < self.max_model_len]
        self.preemptions = 0  # number of times that a request lost its memory and had to be computed anew

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return the next iteration."""
        self.batch = self.batch or self._form_batch()
        if self.batch and self._can_continue(self.batch):
            return self._schedule_decode(self.batch)
        self._dissolve_batch()
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the tokens of an iteration, and return what vLLM's frontend has to know."""
        batch = self.batch
        if batch and batch.pending and scheduler_output is batch.pending[0]:
            outputs = self._record_tokens(batch, model_runner_output)
            return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}
        everything = super().update_from_output(scheduler_output, model_runner_output)
        if batch and (ended := batch.members.keys() - self.requests.keys()):
            batch.remove(ended)
        if self.unsent:
            own = everything.setdefault(0, EngineCoreOutputs())
            own.outputs, self.unsent = self.unsent + own.outputs, []
        return everything

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[tuple[str, int]]:
        """Abort requests. vLLM needs its own records of them for that, so the batch is dissolved first."""
        self._dissolve_batch()
        finished = super().finish_requests(request_ids, finished_status)
        self.unsent = [output for output in self.unsent if output.request_id in self.requests]
        return finished

    def _preempt_request(self, request: Request, timestamp: float, **options: Any) -> None:
        """Take the memory of a running request, and let the request wait."""
        self.preemptions += 1
        super()._preempt_request(request, timestamp, **options)

    def pop_unsent(self) -> list[EngineCoreOutput]:
        """Return all tokens that have arrived and that vLLM's frontend has not been told of."""
        self._dissolve_batch()
        unsent, self.unsent = self.unsent, []
        return unsent

    def _form_batch(self) -> Batch | None:
        """Return a batch of the running requests if each of them decodes one token."""
        if not self.running or self._admits_more() or len(self.running) > self.max_num_scheduled_tokens:
            return None
        first = self.running[0].sampling_params
        if not all(self._only_decodes(request, first.stop_token_ids) for request in self.running):
            return None
        members = [member for member in map(self._member, self.running) if member.tokens_left > 0]
        if not members:
            return None
        return Batch(members, math.gcd(*self.growing) or self.max_model_len)

    def _member(self, request: Request) -> Member:
        """Return the request as a member of a batch. If no tokens are left, its last one has been scheduled."""
        computed, outputs = request.num_computed_tokens, request.num_output_tokens + request.num_output_placeholders
        tokens_left = min(request.max_tokens - outputs, self.max_model_len - 1 - computed)
        return Member(request, computed, outputs, tokens_left)

    def _admits_more(self) -> bool:
        """Return whether so many waiting requests could start that the batch is dissolved for them.

        Blocks must be free for the tokens of the first one, and one more for each running request. If the first one
        took the last blocks, vLLM would soon have to interrupt a request and to compute it anew.
        """
        skipped = getattr(self, "skipped_waiting", ())  # a queue of its own in releases up to 0.30
        waiting = len(self.waiting) + len(skipped)
        free_places = self.max_num_running_reqs - len(self.running)
        together = max(1, int(ADMITTED_TOGETHER * self.max_num_running_reqs))
        if not waiting or free_places < min(waiting, together):
            return False
        request = (skipped or self.waiting).peek_request()
        groups = self.kv_cache_config.kv_cache_groups
        blocks = sum(math.ceil(request.num_tokens / group.kv_cache_spec.block_size) for group in groups)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks + len(self.running) * len(self.growing) <= free_blocks

    def _only_decodes(self, request: Request, stop_token_ids: list[int] | None) -> bool:
        """Return whether all that the next iteration has to do for the request is to decode one token."""
        params = request.sampling_params
        has_plain_params = (
            (params.logprobs, params.prompt_logprobs, params.min_tokens) == (0, None, 0)
            and params.flat_logprobs
            and params.repetition_detection is None
            and params.stop_token_ids == stop_token_ids
        )
        in_flight = request.num_tokens + request.num_output_placeholders
        return (
            has_plain_params
            and not (request.use_structured_output or request.spec_token_ids or request.resumable)
            and not request.is_prefill_chunk
            and request.num_computed_tokens == in_flight - 1
            and not self.encoder_cache_manager.get_cached_input_ids(request)
        )

    def _can_continue(self, batch: Batch) -> bool:
        """Return whether the next iteration is like the one before."""
        due = len(batch.needs_block_at.get(batch.scheduled % batch.block_size, ()))
        blocks = due * len(self.growing)
        return (
            bool(batch.active)
            and not self._admits_more()
            and blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        )

    def _schedule_decode(self, batch: Batch) -> SchedulerOutput:
        """Return the next iteration of a batch."""
        done, members = batch.scheduled, list(batch.active.values())
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(members)
        for index in batch.needs_block_at.get(done % batch.block_size, ()):
            request = members[index].request
            request.num_computed_tokens = members[index].num_computed + done
            new_blocks[index] = self.kv_cache_manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
        requests = CachedRequestData(
            req_ids=list(batch.active),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=[member.num_computed + done for member in members],
            num_output_tokens=[member.num_outputs + done for member in members],
        )
        new_block_ids = self.kv_cache_manager.take_new_block_ids() if self.needs_kv_cache_zeroing else None
        iteration = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=requests,
            num_scheduled_tokens=batch.num_scheduled_tokens,
            total_num_scheduled_tokens=len(members),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=self.kv_cache_manager.get_num_common_prefix_blocks(requests.req_ids[0]),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=new_block_ids or None,
        )
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        batch.pending.append(iteration)
        batch.count_iteration()
        return iteration

    def _record_tokens(self, batch: Batch, sampled: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take the tokens of an iteration, one per request. Return the outputs of requests that have ended."""
        batch.pending.popleft()
        logprobs = sampled.logprobs.logprobs[:, 0].tolist()
        ended = {}
        for name, i in sampled.req_id_to_index.items():
            if member := batch.members.get(name):  # it may have ended after this iteration was scheduled
                (token,) = sampled.sampled_token_ids[i]
                member.tokens.append(token)
                member.logprobs.append(logprobs[i])
                if token in batch.stop or len(member.tokens) == member.tokens_left:
                    ended[name] = self._end(member)
        if ended:
            batch.remove(ended)
        return list(ended.values())

    def _end(self, member: Member) -> EngineCoreOutput:
        """End a request that has sampled its last token. Return all its tokens that vLLM has not been told of."""
        request = member.request
        request.append_output_token_ids(member.tokens)
        self.kv_cache_manager.cache_blocks(request, request.num_tokens - 1)  # for the next turn of an episode
        check_stop(request, self.max_model_len)  # sets the status and the reason
        reason = request.get_finished_reason()
        self.running.remove(request)
        self._free_request(request)
        return member.output(finish_reason=reason, stop_reason=request.stop_reason)

    def _dissolve_batch(self) -> None:
        """Give the requests of the batch, if there is one, what they have sampled."""
        if self.batch is None:
            return
        batch, self.batch = self.batch, None
        for member in batch.members.values():
            request = member.request
            scheduled = min(batch.scheduled, member.tokens_left)
            request.num_computed_tokens = member.num_computed + scheduled
            request.num_output_placeholders += scheduled - len(member.tokens)
            request.append_output_token_ids(member.tokens)
            if member.tokens:
                self.unsent.append(member.output())


def extend_logprobs(processor: LogprobsProcessor, new: LogprobsLists) -> None:
    """Add the log-probabilities of sampled tokens to `processor`, all at once instead of token by token."""
    flat, tokens, logprobs = processor.logprobs, new.logprob_token_ids[:, 0].tolist(), new.logprobs[:, 0].tolist()
    start, count = len(flat.logprobs), len(tokens)
    flat.start_indices += range(start, start + count)
    flat.end_indices += range(start + 1, start + count + 1)
    flat.token_ids += tokens
    flat.logprobs += logprobs
    flat.ranks += new.sampled_token_ranks.tolist()
    flat.decoded_tokens += [None] * count
    processor.cumulative_logprob += sum(logprobs)
