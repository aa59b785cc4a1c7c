"""The classes of rows: what a token is, or how often it occurs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stack.text.tokenizer import Tokenizer

CLASSES = ("never", "rare", "frequent", "reserved", "control", "added")
RARE = 100  # occurrences in the packed training split; fewer are rare


def classify(counts: np.ndarray, tokenizer: Tokenizer, added: Sequence[int] = ()) -> np.ndarray:
    """The class of every row, as its number in ``CLASSES``, int64 [V]; each row is in one.

    Reserved tokens first, then those that growth has ``added``, other control tokens, and plain tokens by how often
    they occur.

    Args:
        counts: occurrences of every id in the packed training split, int64 [V].
        tokenizer: the vocabulary.
        added: rows that growth initialized; those that fill the table up are reserved.
    """
    of = np.digitize(counts, (1, RARE))
    of[list(tokenizer.control.values())] = CLASSES.index("control")
    of[list(added)] = CLASSES.index("added")
    of[list(tokenizer.reserved)] = CLASSES.index("reserved")
    return of
