"""The batch of step s: which pieces of which documents share a window, in which order, as tensors.

Everything here is a pure function of the split's lengths, the window, the seed and the step: neither ranks nor
micro-batches nor what happened before take part, so resuming needs a step number and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stack.config import UserError
from stack.data.packing import Split

IGNORED = -100  # the target of a position that is not learnt from


@dataclass(frozen=True)
class Batch:
    """Windows as tensors. Beyond the segments of a window lies padding: pad id, position 0, ignored target."""

    ids: torch.Tensor  # int64 [B, T]
    targets: torch.Tensor  # int64 [B, T]: the next id of the stream, or IGNORED
    positions: torch.Tensor  # int64 [B, T]: from 0 in every segment
    lengths: tuple[tuple[int, ...], ...]  # per window, the lengths of its segments in order

    @property
    def num_targets(self) -> int:
        """Supervised tokens."""
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True)
class Plan:
    """Pieces of documents, placed: window ``w`` holds the pieces ``first[w]`` to ``first[w + 1]``, in order."""

    document: np.ndarray  # int64 [P]: the document a piece is of
    offset: np.ndarray  # int64 [P]: inputs of that document before the piece
    length: np.ndarray  # int64 [P]: inputs in the piece, 1 to window
    first: np.ndarray  # int64 [W + 1]

    @property
    def num_windows(self) -> int:
        """Windows of one epoch."""
        return len(self.first) - 1


def permutation(size: int, seed: int, *key: int) -> np.ndarray:
    """A seeded order of ``range(size)``, int64.

    Made of raw words of Philox, which numpy keeps the same in every version; ``Generator.permutation`` is not.
    """
    words = np.random.Philox(np.random.SeedSequence([seed % 2**64, *key])).random_raw(size)
    return np.argsort(words, kind="stable")


def plan_windows(lengths: np.ndarray, window: int, seed: int) -> Plan:
    """Place documents of ``lengths`` inputs (int64 [N], each at least 1) into windows of ``window`` inputs.

    A document is cut into window-sized pieces, each a window of its own; what remains of it (all of it, if it is
    short) is placed best-fit, longest first. The seed decides which of equally long pieces goes where.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert window >= 1 and (lengths >= 1).all(), "a window and a document have at least one input"
    whole, rest = np.divmod(lengths, window)
    num_whole = int(whole.sum())
    cut = np.repeat(np.arange(len(lengths)), whole)
    nth = np.arange(num_whole) - np.repeat(np.cumsum(whole) - whole, whole)

    remaining = np.flatnonzero(rest)
    remaining = remaining[permutation(len(remaining), seed, 0)]
    remaining = remaining[np.argsort(-rest[remaining], kind="stable")]
    bins = _best_fit(np.bincount(rest[remaining], minlength=window), window)
    by_bin = np.argsort(bins, kind="stable")
    remaining = remaining[by_bin]
    return Plan(
        document=np.concatenate([cut, remaining]),
        offset=np.concatenate([nth * window, whole[remaining] * window]),
        length=np.concatenate([np.full(num_whole, window), rest[remaining]]),
        first=np.concatenate([np.arange(num_whole + 1), num_whole + np.cumsum(np.bincount(bins))]),
    )


def _best_fit(count: np.ndarray, window: int) -> np.ndarray:
    """Best-fit decreasing of ``count[l]`` pieces of each length l < window: each piece's bin, int64, longest first.

    Bins with the same room are alike, so they are filled together. Taking the rooms in ascending order is best fit
    exactly: a bin with room r takes r // l pieces in a row, because after each it is the tightest that still fits.
    """
    free: list[list[np.ndarray]] = [[] for _ in range(window + 1)]  # bins by the room that is left in them
    is_free = np.zeros(window + 1, dtype=bool)
    placed = [np.zeros(0, dtype=np.int64)]
    num_bins = 0
    for length in range(window - 1, 0, -1):
        left = int(count[length])
        if not left:
            continue
        for room in [*(np.flatnonzero(is_free[length:window]) + length).tolist(), window]:
            each = room // length
            need = -(-left // each)
            if room == window:
                bins = np.arange(num_bins, num_bins + need)
                num_bins += need
            else:
                bins = free[room][0] if len(free[room]) == 1 else np.concatenate(free[room])
                free[room] = [bins[need:]] if need < len(bins) else []
                is_free[room] = need < len(bins)
                bins = bins[:need]
            taken = min(left, len(bins) * each)
            placed.append(np.repeat(bins, each)[:taken])
            full, last = divmod(taken, each)
            for some, room_after in ((bins[:full], room - each * length), (bins[full:], room - last * length)):
                if len(some):
                    free[room_after].append(some)
                    is_free[room_after] = True
            left -= taken
            if not left:
                break
    return np.concatenate(placed)


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
        room = self.num_windows * self.window
        return 1 - int(self.plan.length.sum()) / room if room else 0.0

    def batch(self, window_numbers: Sequence[int] | np.ndarray) -> Batch:
        """These windows, one a row; every row depends on its own number alone."""
        plan, split = self.plan, self.split
        shape = (len(window_numbers), self.window)
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        count = np.arange(self.window)
        lengths = []
        for row, number in enumerate(window_numbers):
            pieces = slice(plan.first[number], plan.first[number + 1])
            starts = split.starts[plan.document[pieces]] + plan.offset[pieces]
            lengths.append(tuple(plan.length[pieces].tolist()))
            begin = 0
            for start, length in zip(starts.tolist(), lengths[-1], strict=True):
                stream = split.ids(start, length + 1)
                end = begin + length
                ids[row, begin:end] = stream[:-1]
                targets[row, begin:end] = stream[1:]
                positions[row, begin:end] = count[:length]
                begin = end
        tensors = (torch.from_numpy(array) for array in (ids, targets, positions))
        return Batch(*tensors, lengths=tuple(lengths))

    def padding(self) -> Batch:
        """One window that is one segment with nothing to learn, for a rank that has none.

        A segment, because every parameter takes part in the backward pass of a rank that others wait for.
        """
        ids = torch.full((1, self.window), self.pad_id, dtype=torch.int64)
        return Batch(ids, torch.full_like(ids, IGNORED), torch.zeros_like(ids), lengths=((self.window,),))


class Batches(Windows):
    """The windows of a training split in the order in which they are learnt.

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
        begin = step * self.global_batch
        stop = begin + self.global_batch if self.end is None else min(begin + self.global_batch, self.end)
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


def in_order(split: Split, window: int, pad_id: int) -> Windows:
    """The windows of a validation split; numbers 0 to ``num_windows`` are the whole of it, each target once."""
    return Windows(split, window=window, seed=0, pad_id=pad_id)
