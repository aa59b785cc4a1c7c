"""Every target once an epoch, nothing across a border, and a batch that depends on its step alone."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.core.errors import UserError
from stack.data.batches import IGNORED, Batches, Mixed, in_order
from stack.data.packed import Split
from stack.data.placement import plan_windows

PAD = 1
SEPARATOR = 0


def split_of(*shards: list[int]) -> Split:
    """A split whose documents have these numbers of tokens; every token of the stream is another number."""
    streams, lengths, starts, offsets, offset, token = [], [], [], [], 0, 10
    for documents in shards:
        stream = []
        for tokens in documents:
            starts.append(offset + len(stream))
            lengths.append(tokens + 1)
            stream += [SEPARATOR, *range(token, token + tokens)]
            token += tokens
        streams.append(np.array([*stream, SEPARATOR], dtype=np.uint32))
        offsets.append(offset)
        offset += len(streams[-1])
    return Split("train", np.array(lengths), np.array(starts), 0, tuple(streams), np.array(offsets))


def batches_of(split: Split, window: int, global_batch: int = 4, seed: int = 0, end: int | None = None) -> Batches:
    return Batches(split, window=window, global_batch=global_batch, seed=seed, pad_id=PAD, end=end)


shards = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=12), min_size=1, max_size=3)
windows = st.integers(1, 12)
seeds = st.integers(-(2**40), 2**40)


@given(shards, windows, seeds)
@settings(max_examples=150, deadline=None)
def test_every_target_is_learnt_once_an_epoch(documents, window, seed):
    split = split_of(*documents)
    batches = batches_of(split, window, seed=seed)
    batch = batches.batch(np.arange(batches.num_windows))
    learnt = Counter(batch.targets[batch.targets != IGNORED].tolist())
    expected = Counter(int(token) for stream in split._shards for token in stream[1:])
    assert learnt == expected
    assert batch.num_targets == split.num_targets == sum(expected.values())
    assert batches.padding_share == pytest.approx(1 - batch.num_targets / batch.ids.numel())


@given(shards, windows, seeds)
@settings(max_examples=150, deadline=None)
def test_a_segment_is_a_part_of_one_document(documents, window, seed):
    split = split_of(*documents)
    batches = batches_of(split, window, seed=seed)
    batch = batches.batch(np.arange(batches.num_windows))
    following = {}  # of each token that is not the separator: the id after it, in its own stream
    for stream in split._shards:
        following.update(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
    for row, lengths in enumerate(batch.lengths):
        assert 1 <= sum(lengths) <= window and all(length >= 1 for length in lengths)
        begin = 0
        for length in lengths:
            ids = batch.ids[row, begin : begin + length].tolist()
            targets = batch.targets[row, begin : begin + length].tolist()
            assert SEPARATOR not in ids[1:], "a document ends before the next <|endoftext|>"
            assert ids[1:] == targets[:-1]
            assert ids[-1] == SEPARATOR or following[ids[-1]] == targets[-1]
            assert batch.positions[row, begin : begin + length].tolist() == list(range(length))
            begin += length
        assert (batch.ids[row, begin:] == PAD).all()
        assert (batch.targets[row, begin:] == IGNORED).all()
        assert (batch.positions[row, begin:] == 0).all()


def naive_best_fit(pieces: list[int], window: int) -> list[int]:
    """The room left in every bin after best-fit decreasing, one piece at a time."""
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else window) - piece)
    return sorted(rooms)


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 25), seeds)
@settings(max_examples=200, deadline=None)
def test_the_plan_is_best_fit_decreasing(lengths, window, seed):
    plan = plan_windows(np.array(lengths, dtype=np.int64), window, seed)
    pieces = [piece for length in lengths for piece in [window] * (length // window) + [length % window] if piece]
    rooms = [window - int(plan.length[a:b].sum()) for a, b in zip(plan.first[:-1], plan.first[1:], strict=True)]
    assert sorted(rooms) == naive_best_fit(pieces, window)
    assert sorted(plan.length.tolist()) == sorted(pieces)
    again = plan_windows(np.array(lengths, dtype=np.int64), window, seed)
    assert all(np.array_equal(getattr(plan, name), getattr(again, name)) for name in vars(plan))


def test_long_items():
    """CASES, long items: documents of 4, 2, 3 and 1 tokens at window 3."""
    batches = batches_of(split_of([4, 2, 3, 1]), window=3)
    batch = batches.batch(np.arange(batches.num_windows))
    rows = {
        tuple(zip(i, t, p, strict=True))
        for i, t, p in zip(batch.ids.tolist(), batch.targets.tolist(), batch.positions.tolist(), strict=True)
    }
    pad = (PAD, IGNORED, 0)
    assert rows == {
        ((0, 10, 0), (10, 11, 1), (11, 12, 2)),
        ((0, 14, 0), (14, 15, 1), (15, 0, 2)),
        ((0, 16, 0), (16, 17, 1), (17, 18, 2)),
        ((12, 13, 0), (13, 0, 1), (18, 0, 0)),  # what is left of the first and of the third document
        ((0, 19, 0), (19, 0, 1), pad),
    }


def test_one_short_document_is_one_padded_window():
    """CASES, short split: never filled with id 0 as text."""
    batches = in_order(split_of([2]), window=6, pad_id=PAD)
    batch = batches.batch(range(batches.num_windows))
    assert batch.ids.tolist() == [[0, 10, 11, PAD, PAD, PAD]]
    assert batch.targets.tolist() == [[10, 11, 0, IGNORED, IGNORED, IGNORED]]
    assert batch.lengths == ((3,),) and batch.num_targets == 3


def test_last_window():
    """CASES, last window: 10 windows, 4 a step."""
    batches = batches_of(split_of([2] * 10), window=3, global_batch=4, end=10)
    steps = [batches.windows_of(step) for step in range(4)]
    assert [len(step) for step in steps] == [4, 4, 2, 0]
    assert sorted(np.concatenate(steps)) == list(range(10))
    assert [batches.batch(step).num_targets for step in steps] == [12, 12, 6, 0]
    assert batches.batch(steps[3]).ids.shape == (0, 3)


@given(shards, windows, seeds, st.integers(1, 7), st.data())
@settings(max_examples=100, deadline=None)
def test_a_step_is_a_pure_function_of_its_number(documents, window, seed, global_batch, data):
    split = split_of(*documents)
    batches = batches_of(split, window, global_batch, seed)
    total = 3 * batches.num_windows
    steps = -(-total // global_batch)
    straight = [batches.windows_of(step) for step in range(steps)]
    order = np.concatenate(straight)[:total].reshape(3, -1)
    assert all(sorted(epoch) == list(range(batches.num_windows)) for epoch in order.tolist())
    for step in data.draw(st.permutations(range(steps)))[:5]:
        assert np.array_equal(batches_of(split, window, global_batch, seed).windows_of(step), straight[step])
        assert np.array_equal(batches.windows_of(step), straight[step])


@given(shards, windows, seeds, st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_ranks_and_micro_batches_share_the_same_batch(documents, window, seed, global_batch, ranks, micro_batch):
    batches = batches_of(split_of(*documents), window, global_batch, seed)
    numbers = batches.windows_of(1)
    whole = batches.batch(numbers)
    parts = [
        batches.batch(mine[begin : begin + micro_batch])
        for mine in np.array_split(numbers, ranks)
        for begin in range(0, len(mine), micro_batch)
    ]
    for name in ("ids", "targets", "positions"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        assert getattr(whole, name).dtype == torch.int64
    assert sum((part.lengths for part in parts), ()) == whole.lengths
    assert sum(part.num_targets for part in parts) == whole.num_targets


def test_epochs_and_seeds_differ():
    split = split_of([2] * 50)
    epoch, other = (batches_of(split, 3, 50, seed=seed) for seed in (0, 1))
    orders = [epoch.windows_of(0), epoch.windows_of(1), other.windows_of(0)]
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_the_order_is_the_same_on_every_machine():
    """Written down, so that neither numpy nor we change what a step means between two halves of a run."""
    batches = batches_of(split_of([2] * 8), window=6, global_batch=4, seed=7)
    assert batches.windows_of(0).tolist() == [1, 3, 2, 0]
    assert batches.windows_of(5).tolist() == [0, 3, 2, 1]
    assert batches.batch([0, 1]).ids.tolist() == [[0, 18, 19, 0, 16, 17], [0, 22, 23, 0, 14, 15]]


def test_nothing_to_learn_from():
    with pytest.raises(UserError, match="0 windows, at least 1"):
        batches_of(split_of(), window=4)
    assert in_order(split_of(), window=4, pad_id=PAD).num_windows == 0


# ---------------------------------------------------------------- what is learnt, and of which source

TURN_END = 7


def talk_of(*shards: list[list[int]]) -> Split:
    """A split whose documents have these masks, one number a token; the tokens are as in `split_of`."""
    split = split_of(*([len(mask) for mask in masks] for masks in shards))
    streams = [[x for mask in masks for x in (0, *mask)] + [0] for masks in shards]
    masks = tuple(np.array(stream, dtype=np.uint8) for stream in streams)
    return replace(split, _masks=masks, num_supervised=sum(map(sum, streams)))


masks = st.lists(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=8), min_size=1, max_size=3)


@given(masks, windows, seeds)
@settings(max_examples=100, deadline=None)
def test_only_what_is_supervised_is_a_target(documents, window, seed):
    split = talk_of(*documents)
    batches = batches_of(split, window, seed=seed)
    numbers = np.arange(batches.num_windows)
    batch, whole = batches.batch(numbers), batches_of(replace(split, _masks=()), window, seed=seed).batch(numbers)
    learnt = Counter(batch.targets[batch.targets != IGNORED].tolist())
    expected = Counter()
    for stream, mask in zip(split._shards, split._masks, strict=True):
        expected.update(stream[mask == 1].tolist())
    assert learnt == expected and batch.num_targets == split.num_targets == batches.num_targets
    assert torch.equal(batch.ids, whole.ids) and batch.lengths == whole.lengths
    assert torch.equal(batch.targets[batch.targets != IGNORED], whole.targets[batch.targets != IGNORED])


def test_stop():
    """CASES, stop: rows of 5 and 9 tokens, pad id equal to the end of text: padding and the closing end of text hide
    no end of turn and add none."""
    rows = [[5, 20, 21, 22, TURN_END], [5, 20, 21, TURN_END, 6, 5, 23, 24, TURN_END]]
    learnt = [[0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 1, 1]]
    ids = [i for row in rows for i in (SEPARATOR, *row)] + [SEPARATOR]
    mask = [i for row in learnt for i in (0, *row)] + [0]
    arrays = [(np.array(ids, dtype=np.uint16),), np.array([0]), (np.array(mask, dtype=np.uint8),), sum(mask)]
    split = Split("train", np.array([6, 10]), np.array([0, 6]), 0, *arrays)
    for window in (6, 7, 10, 12, 16, 20):
        batches = Batches(split, window=window, global_batch=2, seed=0, pad_id=SEPARATOR)
        batch = batches.batch(np.arange(batches.num_windows))
        assert (batch.targets == TURN_END).sum() == 3
        assert (batch.targets == SEPARATOR).sum() == 0
        assert batch.num_targets == 6


@given(shards, windows, seeds)
@settings(max_examples=100, deadline=None)
def test_every_segment_names_its_document(documents, window, seed):
    split = replace(
        split_of(*documents), sources=("a", "b"), _source_of_shard=tuple(n % 2 for n in range(len(documents)))
    )
    assert split.source_of.tolist() == [n % 2 for n, shard in enumerate(documents) for _ in shard]
    batches = batches_of(split, window, seed=seed)
    batch = batches.batch(np.arange(batches.num_windows))
    of_id = np.repeat(np.arange(split.num_documents), split.lengths - 1).tolist()  # tokens are 10, 11 and so on
    for row, (lengths, found) in enumerate(zip(batch.lengths, batch.documents, strict=True)):
        begin = 0
        for length, document in zip(lengths, found, strict=True):
            ids = batch.ids[row, begin : begin + length].tolist()
            assert {of_id[i - 10] for i in ids if i != SEPARATOR} <= {document}
            begin += length
    inputs = Counter()
    for lengths, found in zip(batch.lengths, batch.documents, strict=True):
        for length, document in zip(lengths, found, strict=True):
            inputs[document] += length
    assert inputs == Counter(dict(enumerate(split.lengths.tolist())))
    assert split_of(*documents).source_of.tolist() == [0] * split.num_documents


# ---------------------------------------------------------------- replay

shares = st.fractions(0, Fraction(9, 10), max_denominator=20).map(float)


def mixed_of(own: Split, other: Split, window: int, share: float, global_batch: int, end: int | None = None) -> Mixed:
    return Mixed(batches_of(own, window, global_batch, end=end), batches_of(other, window, global_batch, seed=1), share)


@given(shards, shards, windows, shares, st.integers(1, 9), st.none() | st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_replay_is_an_exact_share_of_both_orders(own, other, window, share, global_batch, end):
    mixed = mixed_of(split_of(*own), split_of(*other), window, share, global_batch, end)
    exact, taken, replayed = Fraction(str(share)), 0, 0
    got: list[list[int]] = [[], []]
    for step in range(12):
        numbers = mixed.windows_of(step)
        assert np.array_equal(
            mixed_of(split_of(*own), split_of(*other), window, share, global_batch, end).windows_of(step), numbers
        )
        taken += len(numbers)
        now = int((numbers >= mixed.first.num_windows).sum())
        replayed += now
        assert replayed == floor(taken * exact)
        assert now in (floor(len(numbers) * exact), floor(len(numbers) * exact) + 1)
        got[0] += numbers[numbers < mixed.first.num_windows].tolist()
        got[1] += (numbers[numbers >= mixed.first.num_windows] - mixed.first.num_windows).tolist()
        assert len(numbers) == global_batch or taken == mixed.end
    assert got[0] == mixed.first.stretch(0, len(got[0])).tolist()
    assert got[1] == mixed.replayed.stretch(0, len(got[1])).tolist()
    if end is not None and taken == mixed.end:
        assert len(got[0]) == end, "the whole ends with the last window of the first"


@given(masks, shards, windows, st.data())
@settings(max_examples=100, deadline=None)
def test_mixed_rows_are_the_rows_of_the_two(own, other, window, data):
    mixed = mixed_of(talk_of(*own), split_of(*other), window, 0.5, 4)
    count = mixed.first.num_windows
    numbers = data.draw(st.lists(st.integers(0, count + mixed.replayed.num_windows - 1), max_size=8))
    batch = mixed.batch(numbers)
    assert batch.ids.shape == (len(numbers), window)
    for row, number in enumerate(numbers):
        one = mixed.first.batch([number]) if number < count else mixed.replayed.batch([number - count])
        for name in ("ids", "targets", "positions"):
            assert torch.equal(getattr(batch, name)[row], getattr(one, name)[0])
            assert getattr(batch, name).dtype == torch.int64
        assert batch.lengths[row] == one.lengths[0]
        behind = 0 if number < count else mixed.first.split.num_documents
        assert batch.documents[row] == tuple(behind + document for document in one.documents[0])
    assert torch.equal(mixed.padding().ids, mixed.first.padding().ids)


def test_a_tenth_is_a_tenth():
    """Ten steps of one window at 0.1: one is replayed; 0.29 of 100 windows are 29, though 0.29 * 100 is less."""
    own, other = split_of([2] * 50), split_of([2] * 7)
    steps = [mixed_of(own, other, 3, 0.1, 1).windows_of(step) for step in range(10)]
    assert [int(numbers[0] >= 50) for numbers in steps] == [0] * 9 + [1]
    assert (mixed_of(own, other, 3, 0.29, 100).windows_of(0) >= 50).sum() == 29
    mixed = mixed_of(own, other, 3, 0.2, 5)
    assert mixed.num_windows == 62 and mixed.num_targets == 50 * 3 + 12 * 3
    assert (mixed.batch([50]).ids == mixed.batch([57]).ids).all()
