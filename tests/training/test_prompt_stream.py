"""Prefetched prompts are identical to prompts encoded on demand."""

import shutil
import threading
from dataclasses import replace

import pytest
import torch

from common import distributed
from common.errors import StepFailed, UserError
from common.records import Rollout, Turn
from data import encode_prompt, encode_prompts, load_processor, load_samples
from rollout import prompt_seed
from training import prompt_stream
from training.prompt_stream import DrawnPrompt, PromptStream, _epoch_order, row_at


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
    drawn = stream.draw([5, 6, 7, 200], 0)
    want = encode_prompts(stream.rows(drawn), stream.processor)
    assert same(stream.get(drawn), want)
    stream.prefetch(drawn)
    assert same(stream.get(drawn), want)
    stream.prefetch(stream.draw([7, 1, 2, 200], 0))  # a retried step needs positions that were not prefetched
    assert same(stream.get(drawn), want)


def test_what_is_not_encoded_when_it_is_needed_is_encoded_in_all_threads(stream, monkeypatch):
    drawn, begun, go_on = stream.draw([5, 6, 7], 0), threading.Event(), threading.Event()
    want = encode_prompts(stream.rows(drawn), stream.processor)

    def encode(sample, processor, teacher):
        begun.set()
        assert go_on.wait(10)
        return encode_prompt(sample, processor)

    def encode_now(samples, processor, teacher):
        assert [sample.source for sample in samples] == [prompt.source for prompt in want[1:]]
        go_on.set()
        return encode_prompts(samples, processor)

    monkeypatch.setattr(prompt_stream, "encode_prompt", encode)
    monkeypatch.setattr(prompt_stream, "encode_prompts", encode_now)
    stream.prefetch(drawn)
    assert begun.wait(10)
    assert same(stream.get(drawn), want)


def test_a_picture_lost_after_loading_stops_the_step_that_needs_it(stream, tmp_path):
    drawn = [each for each in stream.draw(range(1000), 0) if stream.rows([each])[0].source.endswith("row 4")][:1]
    for file in (tmp_path / "shapes" / "images").iterdir():
        file.unlink()
    stream.prefetch(drawn)
    with pytest.raises(StepFailed, match=r"row 4: image .*it passed the check at the start"):
        stream.get(drawn)


def test_a_row_that_another_process_cannot_read_stops_this_one_too(stream, monkeypatch):
    """Otherwise, this process would wait for the other one."""
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, "row 9: lost"])
    with pytest.raises(StepFailed, match="row 9: lost"):
        stream.get(stream.draw([0], 0))


def test_another_prompt_or_answer_makes_another_data_set(stream):
    """A resumed run compares the fingerprints."""
    fingerprints = [stream.fingerprint]
    for change in ({"answer": "other"}, {"turns": [Turn("user", ["other"])]}, {"system": "other"}):
        samples = [replace(stream.samples[0], **change), *stream.samples[1:]]
        fingerprints.append(PromptStream(samples, stream.processor, seed=3).fingerprint)
    assert len({fingerprint["rows_digest"] for fingerprint in fingerprints}) == 4
    assert PromptStream(list(stream.samples), stream.processor, seed=9).fingerprint == stream.fingerprint


def test_engines_of_several_processes_get_equal_shares(stream, monkeypatch):
    """Each of two engines, with two processes each, gets three prompts. No two processes sample the same prompt."""
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    assigned = []
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assigned.append(stream.assign_prompts(stream.draw(range(6), 0), 8, 100, tensor_parallel=2))
    assert sorted(i for indices in assigned for i in indices) == list(range(6))
    assert len(assigned[0] + assigned[1]) == len(assigned[2] + assigned[3]) == 3


def shares_of_two(stream: PromptStream, drawn: list[DrawnPrompt], monkeypatch) -> list[list[int]]:
    """Return the indices of the prompts that each of two processes samples."""
    shares = []
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "world_size", lambda: 2)
        for rank in range(2):
            patch.setattr(distributed, "rank", lambda rank=rank: rank)
            shares.append(stream.assign_prompts(drawn, 8, 1000))
    return shares


def test_what_took_long_is_expected_to_take_long(stream, monkeypatch):
    """Otherwise, some processes would wait for others. A row that was never sampled counts as one of mean length."""
    drawn = stream.draw(range(4), 0)
    assert [len(indices) for indices in shares_of_two(stream, drawn, monkeypatch)] == [2, 2]
    for each, lengths in zip(drawn, ([20, 40], [20, 40], [600, 800])):
        stream.record(each.row, lengths, [1.0, 0.0])
    assert shares_of_two(stream, drawn, monkeypatch) == [[2], [0, 1, 3]]
    (prompt,) = stream.get(drawn[2:3])
    assert prompt.expected_length == 700


@pytest.mark.parametrize(
    ("length", "finished", "want"), [(30, True, 0), (30, False, 70), (60, False, 60), (90, False, 30)]
)
def test_what_is_left_of_an_unfinished_completion(length, finished, want):
    """Of 100 expected tokens, 30 leave 70. After half of them, as many again are expected, but at most 120 in all."""
    rollout = Rollout(torch.zeros(length).long(), torch.zeros(length), finished=finished)
    assert prompt_stream._expected_tokens(rollout, 100, 120) == want


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (10, 10), (11, 8), (7, 3)])
def test_no_batch_has_a_row_twice_and_every_epoch_has_every_row_once(rows, batch):
    order = [row_at(position, rows, 3, batch=batch) for position in range(20 * rows * batch)]
    for first in range(0, len(order), batch):
        assert len(set(order[first : first + batch])) == batch
    for first in range(0, len(order), rows):
        assert sorted(order[first : first + rows]) == list(range(rows))
    _epoch_order.cache_clear()  # as after a restart
    position = 13 * rows + 1
    assert row_at(position, rows, 3, batch=batch) == order[position]


def test_drop_last_leaves_out_what_does_not_fill_a_batch():
    """Other rows are left out in each epoch."""
    epochs = [[row_at(8 * epoch + i, 10, 3, batch=4, drop_last=True) for i in range(8)] for epoch in range(30)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert {row for epoch in epochs for row in set(range(10)) - set(epoch)} == set(range(10))


def test_drop_last_needs_a_full_batch(stream):
    """A batch may have as many prompts as there are rows."""
    for batch, length in ((5, 10), (12, 12)):
        assert PromptStream(stream.samples, stream.processor, 0, batch=batch, drop_last=True).epoch_length == length
    with pytest.raises(UserError, match="--drop_last drops every row: prompts_per_step is 13, and there are 12 rows"):
        PromptStream(stream.samples, stream.processor, 0, batch=13, drop_last=True)


def test_checkpoints_of_earlier_versions_go_on_with_the_same_rows_and_seeds():
    """Another order would train on some rows twice and on others never. A new run would not notice it.

    The numbers were printed once by this code. They must not change without a reason.
    """
    assert [row_at(i, 8, 3) for i in range(12)] == [6, 7, 2, 1, 4, 5, 3, 0, 2, 1, 4, 0]
    assert [row_at(i, 7, 3, batch=3) for i in range(14)] == [5, 6, 2, 1, 4, 3, 0, 2, 1, 4, 0, 5, 6, 3]
    assert [row_at(i, 7, 3, batch=3, drop_last=True) for i in range(9)] == [5, 6, 2, 1, 4, 3, 2, 1, 4]
    assert [prompt_seed(*each) for each in ((0, 0), (0, 1), (1, 0))] == [2968811710, 3964924996, 1835504127]


def test_prompts_at_different_positions_have_different_seeds():
    assert len({prompt_seed(seed, position) for seed in range(3) for position in range(100)}) == 300


def test_a_run_may_be_resumed_after_hundreds_of_epochs():
    """Each epoch's order depends on the one before; in a resumed run, none of them is there yet."""
    epoch = [row_at(500 * 601 + i, 601, seed=3, batch=512) for i in range(601)]
    assert sorted(epoch) == list(range(601))
    begun = 500 * 601 % 512
    before = [row_at(500 * 601 - 1 - i, 601, seed=3, batch=512) for i in range(begun)]
    assert not {*before} & {*epoch[: 512 - begun]}


def test_rewards_of_a_row_are_counted_and_an_order_sees_them(stream, monkeypatch):
    (drawn,) = stream.draw([3], 0)
    stream.record(drawn.row, [4, 4, 4], [1.0, 0.0, float("nan")])
    stream.record(drawn.row, [4, 4], [1.0, 1.0])
    assert stream.rewarded == {str(drawn.row): (4, pytest.approx(0.75))}
    monkeypatch.setitem(prompt_stream.ORDERS, "default", lambda stream, position, cfg: len(stream.rewarded) + position)
    assert [each.row for each in stream.draw([0, 2], 1)] == [1, 3]
