"""The batch of step s: which pieces of which documents share a window, in which order, as tensors.

Everything here is a pure function of the split's lengths, the window, the seed and the step: neither ranks nor
micro-batches nor what happened before take part, so resuming needs a step number and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np
import torch

from stack.core.errors import UserError
from stack.data.packed import Split
from stack.data.placement import permutation, plan_windows

IGNORED = -100  # the target of a position that is not supervised


@dataclass(frozen=True)
class Batch:
    """Windows as tensors. Beyond the segments of a window lies padding: pad id, position 0, ignored target."""

    ids: torch.Tensor  # int64 [B, T]
    targets: torch.Tensor  # int64 [B, T]: the next id of the stream, or IGNORED
    positions: torch.Tensor  # int64 [B, T]: from 0 in every segment
    lengths: tuple[tuple[int, ...], ...]  # per window, the lengths of its segments in order
    documents: tuple[tuple[int, ...], ...] = ()  # per window, which document of the split each segment is of

    @property
    def num_targets(self) -> int:
        """Supervised tokens."""
        return int((self.targets != IGNORED).sum())


class Windows:
    """The planned windows of a split, by number."""

    def __init__(self, split: Split, *, window: int, seed: int, pad_id: int):
        self.split = split
        self.window = window
        self.pad_id = pad_id
        self.plan = plan_windows(split.lengths, window, seed)
        self.num_windows = self.plan.num_windows

    @property
    def padding_share(self) -> float:
        """Positions of all windows that hold no input."""
        return self.plan.padding_share(self.window)

    @property
    def num_targets(self) -> int:
        """Supervised tokens of all windows."""
        return self.split.num_targets

    def batch(self, window_numbers: Sequence[int] | np.ndarray) -> Batch:
        """These windows, one a row; every row depends on its own number alone."""
        plan, split = self.plan, self.split
        shape = (len(window_numbers), self.window)
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        count = np.arange(self.window)
        lengths, documents = [], []
        for row, number in enumerate(window_numbers):
            pieces = slice(plan.first[number], plan.first[number + 1])
            starts = split.starts[plan.document[pieces]] + plan.offset[pieces]
            lengths.append(tuple(plan.length[pieces].tolist()))
            documents.append(tuple(plan.document[pieces].tolist()))
            begin = 0
            for start, length in zip(starts.tolist(), lengths[-1], strict=True):
                stream = split.ids(start, length + 1)
                end = begin + length
                ids[row, begin:end] = stream[:-1]
                targets[row, begin:end] = stream[1:]
                supervised = split.supervised(start + 1, length)
                if supervised is not None:
                    targets[row, begin:end][supervised == 0] = IGNORED
                positions[row, begin:end] = count[:length]
                begin = end
        tensors = (torch.from_numpy(array) for array in (ids, targets, positions))
        return Batch(*tensors, lengths=tuple(lengths), documents=tuple(documents))

    def padding(self) -> Batch:
        """One window that is one segment with nothing to learn, for a rank that has none.

        A segment, because every parameter takes part in the backward pass of a rank that others wait for.
        """
        ids = torch.full((1, self.window), self.pad_id, dtype=torch.int64)
        return Batch(ids, torch.full_like(ids, IGNORED), torch.zeros_like(ids), ((self.window,),), ((-1,),))


class Batches(Windows):
    """The windows of a training split in the order in which they are trained on.

    Epoch after epoch visits every window once, each epoch in its own seeded order; step s takes the next
    ``global_batch`` windows of that endless order, which ``end`` (windows) cuts: the last batch may be smaller.
    """

    def __init__(self, split: Split, *, window: int, global_batch: int, seed: int, pad_id: int, end: int | None = None):
        super().__init__(split, window=window, seed=seed, pad_id=pad_id)
        if not self.num_windows:
            raise UserError("the training split has no document: 0 windows, at least 1 is needed; give more text")
        self.global_batch = global_batch
        self.end = end
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))  # of the epoch asked for last

    def windows_of(self, step: int) -> np.ndarray:
        """The window numbers of step ``step``, int64 [at most global_batch]; none beyond ``end``."""
        return self.stretch(*_stretch_of(step, self.global_batch, self.end))

    def stretch(self, begin: int, stop: int) -> np.ndarray:
        """The window numbers at ``begin`` to ``stop`` of the endless order, int64 [stop - begin]."""
        parts = [np.zeros(0, dtype=np.int64)]
        while begin < stop:
            epoch, at = divmod(begin, self.num_windows)
            parts.append(self._order_of(epoch)[at : at + stop - begin])
            begin += len(parts[-1])
        return np.concatenate(parts)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self.num_windows, self._seed, 1, epoch))
        return self._order[1]


def _stretch_of(step: int, global_batch: int, end: int | None) -> tuple[int, int]:
    """The windows of a step in an endless order that ``end`` cuts: the first and the one behind the last."""
    begin = step * global_batch
    stop = begin + global_batch if end is None else min(begin + global_batch, end)
    return begin, max(begin, stop)


class Mixed:
    """Batches of which a fixed share are windows of a second split, as :class:`Batches` has them.

    Of the first n windows floor(n * share) are replayed ones, exactly; so a step has the floor or one more of its
    share. Each of the two comes in its own order, epoch after epoch. Window numbers from
    ``first.num_windows`` on are the replayed ones', over and over.

    Args:
        first: what the run is for; its ``end`` cuts the whole.
        replayed: the rest, of the same window.
        share: of all windows that are replayed, 0 to 1 exclusive.
    """

    def __init__(self, first: Batches, replayed: Batches, share: float):
        assert first.window == replayed.window and 0 <= share < 1
        self.first, self.replayed = first, replayed
        self.global_batch = first.global_batch
        self._share = Fraction(str(share))  # 0.1 is a tenth, so that no rounding moves a window to another step
        self.num_windows = self._until(first.num_windows)
        self.end = None if first.end is None else self._until(first.end)

    @property
    def num_targets(self) -> int:
        """Supervised tokens of ``num_windows`` windows: those of one epoch of the first, and what is replayed in it."""
        replayed = self.num_windows - self.first.num_windows
        return self.first.num_targets + round(replayed * self.replayed.num_targets / self.replayed.num_windows)

    def windows_of(self, step: int) -> np.ndarray:
        """The window numbers of step ``step``, int64 [at most global_batch]; none beyond ``end``."""
        begin, stop = _stretch_of(step, self.global_batch, self.end)
        before, after = (floor(n * self._share) for n in (begin, stop))
        own = self.first.stretch(begin - before, stop - after)
        return np.concatenate([own, self.first.num_windows + self.replayed.stretch(before, after)])

    def batch(self, window_numbers: Sequence[int] | np.ndarray) -> Batch:
        """These windows, one a row; the documents of replayed ones are numbered behind those of the first split."""
        numbers = np.asarray(window_numbers, dtype=np.int64)
        is_own = numbers < self.first.num_windows
        own = self.first.batch(numbers[is_own])
        replayed = self.replayed.batch((numbers[~is_own] - self.first.num_windows) % self.replayed.num_windows)
        behind = self.first.split.num_documents
        documents = [*own.documents, *(tuple(behind + number for number in row) for row in replayed.documents)]
        lengths = [*own.lengths, *replayed.lengths]
        rows = np.argsort(np.argsort(~is_own, kind="stable"), kind="stable")  # where each row stands among those
        tensors = (torch.cat([getattr(b, n) for b in (own, replayed)])[rows] for n in ("ids", "targets", "positions"))
        return Batch(*tensors, tuple(lengths[row] for row in rows), tuple(documents[row] for row in rows))

    def padding(self) -> Batch:
        """One window that is one segment with nothing to learn, for a rank that has none."""
        return self.first.padding()

    def _until(self, own: int) -> int:
        """The least number of windows of which ``own`` are the first's."""
        return floor((own - 1) / (1 - self._share)) + 1


def in_order(split: Split, window: int, pad_id: int) -> Windows:
    """The windows of a validation split; numbers 0 to ``num_windows`` are the whole of it, each target once."""
    return Windows(split, window=window, seed=0, pad_id=pad_id)
