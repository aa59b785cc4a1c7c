"""Which pieces of which documents share a window: best fit, a pure function of lengths, window and seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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

    def padding_share(self, window: int) -> float:
        """Positions of all windows that hold no input."""
        room = self.num_windows * window
        return 1 - int(self.length.sum()) / room if room else 0.0


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
