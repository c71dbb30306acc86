"""Prefetched prompts are identical to prompts encoded on demand."""

import shutil
import threading
from dataclasses import replace

import pytest
import torch

from common import distributed
from common.errors import StepFailed, UserError
from data import encode_prompt, encode_prompts, load_processor, load_samples
from training import prompt_stream
from training.partial_rollouts import DrawnPrompt
from training.prompt_stream import PromptStream, _epoch_order, prompt_seed, row_at


@pytest.fixture
def stream(tiny_model, shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "shapes")
    processor = load_processor(tiny_model, "count")
    return PromptStream(load_samples(str(tmp_path / "shapes"), "count", processor=processor), processor, seed=3)


def same(a, b) -> bool:
    return [p.source for p in a] == [p.source for p in b] and all(
        torch.equal(x.ids, y.ids) and torch.equal(x.vision["pixel_values"], y.vision["pixel_values"])
        for x, y in zip(a, b)
    )


def test_prepared_or_not_the_prompts_are_the_same(stream):
    positions = [5, 6, 7, 200]
    want = encode_prompts(stream.rows(positions), stream.processor)
    assert same(stream.get(positions), want)
    stream.prefetch(positions)
    assert same(stream.get(positions), want)
    stream.prefetch([7, 1, 2, 200])  # a retried step needs positions that were not prefetched
    assert same(stream.get(positions), want)


def test_what_is_not_encoded_when_it_is_needed_is_encoded_in_all_threads(stream, monkeypatch):
    positions, begun, go_on = [5, 6, 7], threading.Event(), threading.Event()
    want = encode_prompts(stream.rows(positions), stream.processor)

    def encode(sample, processor):
        begun.set()
        assert go_on.wait(10)
        return encode_prompt(sample, processor)

    def encode_now(samples, processor):
        assert [sample.source for sample in samples] == [prompt.source for prompt in want[1:]]
        go_on.set()
        return encode_prompts(samples, processor)

    monkeypatch.setattr(prompt_stream, "encode_prompt", encode)
    monkeypatch.setattr(prompt_stream, "encode_prompts", encode_now)
    stream.prefetch(positions)
    assert begun.wait(10)
    assert same(stream.get(positions), want)


def test_a_picture_lost_after_loading_stops_the_step_that_needs_it(stream, tmp_path):
    position = next(p for p in range(1000) if stream.rows([p])[0].source.endswith("row 4"))
    for file in (tmp_path / "shapes" / "images").iterdir():
        file.unlink()
    stream.prefetch([position])
    with pytest.raises(StepFailed, match=r"row 4: image .*it passed the check at the start"):
        stream.get([position])


def test_a_row_that_another_process_cannot_read_stops_this_one_too(stream, monkeypatch):
    """Otherwise, this process would wait for the other one."""
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, "row 9: lost"])
    with pytest.raises(StepFailed, match="row 9: lost"):
        stream.get([0])


def test_another_prompt_or_answer_makes_another_data_set(stream):
    """A resumed run compares the fingerprints."""
    fingerprints = [stream.fingerprint]
    for change in ({"answer": "other"}, {"prompt": "<image>other"}):
        samples = [replace(stream.samples[0], **change), *stream.samples[1:]]
        fingerprints.append(PromptStream(samples, stream.processor, seed=3).fingerprint)
    assert len({fingerprint["rows_digest"] for fingerprint in fingerprints}) == 3
    assert PromptStream(list(stream.samples), stream.processor, seed=9).fingerprint == stream.fingerprint


def test_engines_of_several_processes_get_equal_shares(stream, monkeypatch):
    """Each of two engines, with two processes each, gets three prompts. No two processes sample the same prompt."""
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    assigned = []
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assigned.append(stream.assign_prompts([DrawnPrompt(i, 0) for i in range(6)], 8, 100, tensor_parallel=2))
    assert sorted(i for indices in assigned for i in indices) == list(range(6))
    assert len(assigned[0] + assigned[1]) == len(assigned[2] + assigned[3]) == 3


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (10, 10), (11, 8), (7, 3)])
def test_no_batch_has_a_row_twice_and_every_epoch_has_every_row_once(rows, batch):
    order = [row_at(position, [rows], 3, batch=batch) for position in range(20 * rows * batch)]
    for first in range(0, len(order), batch):
        assert len(set(order[first : first + batch])) == batch
    for first in range(0, len(order), rows):
        assert sorted(order[first : first + rows]) == list(range(rows))
    _epoch_order.cache_clear()  # as after a restart
    position = 13 * rows + 1
    assert row_at(position, [rows], 3, batch=batch) == order[position]


def test_drop_last_leaves_out_what_does_not_fill_a_batch():
    """Other rows are left out in each epoch."""
    epochs = [[row_at(8 * epoch + i, [10], 3, batch=4, drop_last=True) for i in range(8)] for epoch in range(30)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert {row for epoch in epochs for row in set(range(10)) - set(epoch)} == set(range(10))


def test_drop_last_needs_a_full_batch(stream):
    assert PromptStream(stream.samples, stream.processor, 0, batch=5, drop_last=True).epoch_length == 10
    with pytest.raises(UserError, match="--drop_last drops every row: prompts_per_step is 13, and there are 12 rows"):
        PromptStream(stream.samples, stream.processor, 0, batch=13, drop_last=True)


def test_prompts_at_different_positions_have_different_seeds():
    assert len({prompt_seed(seed, position) for seed in range(3) for position in range(100)}) == 300


def test_a_run_may_be_resumed_after_hundreds_of_epochs():
    """Each epoch's order depends on the one before; in a resumed run, none of them is there yet."""
    epoch = [row_at(500 * 601 + i, [601], seed=3, batch=512) for i in range(601)]
    assert sorted(epoch) == list(range(601))
    begun = 500 * 601 % 512
    before = [row_at(500 * 601 - 1 - i, [601], seed=3, batch=512) for i in range(begun)]
    assert not {*before} & {*epoch[: 512 - begun]}
