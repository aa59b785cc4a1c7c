"""Long texts in portions: what the tokenizer library is given at a time.

Two things are too much for it. A stretch of one kind of character (letters without a blank, blanks, dashes) is one word
to byte-level BPE: millions of them end its regex engine, and learning merges from one takes the square of its length.
And a text takes more than a hundred times its size while it is encoded.

So a stretch is cut after every ``LONGEST`` characters, and a text of more than ``PORTION`` between two words, where no
token stands across. Ids are those of the whole text unless a stretch is longer than ``LONGEST``; then a word that is
cut is encoded as several. Nothing is ever lost: the portions, one after another, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 1_000  # characters of one kind in a row; the longest of 26 MB of English is 75
PORTION = 250_000  # characters
_KINDS = (
    r"[^\W\d_]",
    r"\d",
    r"\s",
    r"[^\w\s]",
    "_",
)  # letters, digits, white space, all else; each character is of one
_HALF = LONGEST // 2
_FROM_HERE = re.compile("|".join(f"({kind}{{{_HALF},}})" for kind in _KINDS))
_UP_TO_HERE = [re.compile(rf"{kind}*\Z") for kind in _KINDS]
# Where words end, byte-level BPE of every make begins a new token: none holds a letter or digit and white space after.
_BETWEEN_WORDS = re.compile(r"[^\W_](?=\s)")


def portions(text: str) -> list[str]:
    """The text in parts that the tokenizer library can take; nearly every text is one."""
    if len(text) <= LONGEST:
        return [text]
    cuts = list(_inside_stretches(text))
    if len(text) > PORTION:
        cuts = sorted({*cuts, *_between_words(text)})
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)] if cuts else [text]


def _inside_stretches(text: str) -> Iterator[int]:
    """Where stretches of more than ``LONGEST`` are cut.

    A long stretch covers some multiple of half of ``LONGEST`` and as much behind it, so looking there is enough.
    """
    at = 0
    while at < len(text):
        found = _FROM_HERE.match(text, at)
        if found is None:
            at += _HALF
            continue
        before = _UP_TO_HERE[found.lastindex - 1].search(text, max(0, at - _HALF), at)
        begin, end = before.start(), found.end()
        yield from range(begin + LONGEST, end, LONGEST)
        at = -(-end // _HALF) * _HALF


def _between_words(text: str) -> Iterator[int]:
    """A cut behind about every ``PORTION`` characters; none where no word ends."""
    at = PORTION
    while at < len(text) and (found := _BETWEEN_WORDS.search(text, at)) is not None:
        yield found.end()
        at = found.end() + PORTION
