"""Growth of a vocabulary: what becomes of every token and every row.

Append-only. A token that is there is left alone; a missing one takes a reserved token (renamed, its row initialized
anew) and then a new id. Old rows and their moments stay bit-equal; each initialized row is the mean of the live old
rows. For linear logits the mean's logit is the mean of the live logits, so by Jensen it adds at most Z/V to the
partition function Z of V live rows, and M such rows give ``KL(old || new) <= log(1 + M/V)`` at every position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stack.core.errors import UserError
from stack.text.tokenizer import MULTIPLE, RESERVED, RESERVED_TEXT, Tokenizer

INITIALIZER = "mean of the live old rows"


@dataclass(frozen=True)
class Growth:
    """What becomes of every row. Row i of the new table is row i of the old one, or it is initialized."""

    old_vocabulary: str  # digests
    new_vocabulary: str
    old_rows: int
    new_rows: int
    renamed: tuple[tuple[int, str, str], ...]  # (id, old text, new text): reserved tokens that were taken
    added: tuple[tuple[int, str], ...]  # (id, text): tokens that were not there, reserved ones of the padding too
    live: tuple[int, ...]  # old rows whose token means something: those that are averaged
    initialized: tuple[int, ...]  # rows that are renamed, taken by a new token, or did not exist

    @property
    def unchanged(self) -> bool:
        """True where the base's vocabulary and table are left alone."""
        return not self.renamed and not self.added

    @property
    def bound(self) -> float:
        """``log(1 + M/V)``, which KL does not exceed where logits are linear."""
        return math.log1p(len(self.initialized) / len(self.live))

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values; ranges of rows are ``[first, last]``, both inside."""
        kept = sorted(set(range(self.old_rows)) - set(self.initialized))
        return {
            "old_vocabulary": self.old_vocabulary,
            "new_vocabulary": self.new_vocabulary,
            "old_rows": self.old_rows,
            "new_rows": self.new_rows,
            "renamed": [list(entry) for entry in self.renamed],
            "added": [list(entry) for entry in self.added],
            "kept": [{"old": part, "new": part} for part in _ranges(kept)],
            "initialized": [{"rows": part, "initializer": INITIALIZER} for part in _ranges(self.initialized)],
            "live": _ranges(self.live),
            "counts": {"kept": len(kept), "initialized": len(self.initialized), "live": len(self.live)},
            "bound": self.bound,
        }

    def summary(self) -> str:
        """One line for people."""
        if self.unchanged:
            return f"vocabulary: all chat tokens are there already; {self.old_rows:,} rows are left as they are"
        texts = [text for _, _, text in self.renamed] + [t for _, t in self.added if not RESERVED_TEXT.fullmatch(t)]
        how = f"{len(texts)} tokens, {len(self.renamed)} of them in reserved rows" if texts else "no token missing"
        return f"vocabulary: {self.old_rows:,} → {self.new_rows:,} rows ({how}); {len(self.initialized)} initialized"


def _ranges(ids: Iterable[int]) -> list[list[int]]:
    """``[0, 1, 2, 5]`` → ``[[0, 2], [5, 5]]``."""
    runs = (list(run) for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


def plan_growth(tokenizer: Tokenizer, num_rows: int, tokens: Sequence[str]) -> Growth:
    """Which id each missing token takes, and what fills the table up."""
    assert num_rows >= tokenizer.vocab_size, "a token without a row"
    _check_tokens(tokenizer, tokens)
    names = {index: text for text, index in tokenizer.control.items()}
    missing = [text for text in tokens if text not in tokenizer.control]
    renamed = [(index, names[index], text) for index, text in zip(tokenizer.reserved, missing, strict=False)]
    added = list(enumerate(missing[len(renamed) :], tokenizer.vocab_size))
    taken = {index for index, _ in added}
    new_rows = -(-max(num_rows, tokenizer.vocab_size + len(added)) // MULTIPLE) * MULTIPLE
    numbers = [int(found[1]) for found in map(RESERVED_TEXT.fullmatch, tokenizer.control) if found]
    free, first = tokenizer.vocab_size + len(added), max(numbers, default=-1) + 1
    added += [(index, RESERVED.format(first + i)) for i, index in enumerate(range(free, new_rows))]
    dead = set(tokenizer.reserved)
    initialized = {index for index, _, _ in renamed} | taken | set(range(num_rows, new_rows))
    return Growth(
        old_vocabulary=tokenizer.digest,
        new_vocabulary="",  # known when it is made
        old_rows=num_rows,
        new_rows=new_rows,
        renamed=tuple(renamed),
        added=tuple(added),
        live=tuple(index for index in range(tokenizer.vocab_size) if index not in dead),
        initialized=tuple(sorted(initialized)),
    )


def _check_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """UserError unless each can be a control token."""
    for text in tokens:
        reason = ""
        if not text or text != text.strip():
            reason = "is empty or has white space at an end"
        elif tokens.count(text) > 1:
            reason = "is named twice"
        elif RESERVED_TEXT.fullmatch(text):
            reason = "is the text of a reserved token, which is never sampled"
        elif text not in tokenizer.control and tokenizer.token_to_id(text) is not None:
            reason = f"is a plain token of {tokenizer.folder}, so text could spell it"
        if reason:
            raise UserError(f"sft.tokens: {text!r} {reason}; give another text")
