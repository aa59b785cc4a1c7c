"""What is held out for validation: whole documents by a hash of each, or of a small corpus its last part.

The hash knows no order and no neighbours, so a document keeps its side whatever else there is. It needs many documents:
where it would leave either side without any (one file of text, twenty conversations), every source holds out its last
part instead, about the same share of its bytes. Documents wholly within it are held out; the one on the border becomes
two, cut at the end of a paragraph, else of a line, a sentence, a word. Conversations are never cut.

Packing, the training of the tokenizer and the questions of fine-tuning all ask here, so they agree.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from stack.config.schema import Conversations, Data, Source
from stack.data import sources as corpus
from stack.data.sources import Document

LEAST = 100  # bytes of a source: a shorter last part says nothing
SLACK = 0.5  # how far from its share the last part may be, as a share of that, for the sake of a better border
_LINE = r"(?:\r\n|\n|\r(?!\n))"
_BORDERS = [  # ends of paragraphs, lines, sentences and words; the cut is behind the match
    re.compile(pattern)
    for pattern in (rf"{_LINE}[ \t]*{_LINE}+|\u2029", rf"{_LINE}|\u2028", r"[.!?…][\"'”’)\]]*\s+|[。！？]", r"\s+")
]


@dataclass(frozen=True)
class LastParts:
    """The last parts of sources, by the keys of documents: equal ones are on the same side, wherever they stand."""

    whole: set[bytes]  # documents that are held out whole
    cut: dict[bytes, tuple[float, float]]  # one of a source: its share behind the cut, and how far off is as good


@dataclass(frozen=True)
class Rule:
    """Which side every document of some data is on. Made by :func:`rule_of`."""

    data: Data
    last_parts: LastParts | None = None  # None: the hash decides
    says: str | None = None  # a line for people, where it is not the hash

    def parts(self, source: Source, document: Document) -> Iterator[tuple[Document, bool]]:
        """The document of ``source``, or the two that it becomes, each with whether it is held out."""
        if self.last_parts is None:
            yield document, corpus.held_out(document.key, self.data.share_of(source), self.data.seed)
            return
        if document.key not in self.last_parts.cut:
            yield document, document.key in self.last_parts.whole
            return
        cut = _cut(document.text, *self.last_parts.cut[document.key])
        yield _part(document.text[:cut], document.row), False
        yield _part(document.text[cut:], document.row), True

    def measured(self, source: Source, document: Document) -> bool:
        """Whether the loss of a held-out document is measured; of the hash's, some sources only ask the rest."""
        share = self.data.measured_share_of(source)
        return share > 0 and (self.last_parts is not None or corpus.held_out(document.key, share, self.data.seed))


def rule_of(data: Data) -> Rule:
    """The rule for these data. Reads until the hash has put a document on either side; of a small corpus all of it.

    UserError where a source cannot be read.
    """
    sources = {name: source for name, source in sorted(data.resolved_sources().items()) if source.weight > 0}
    if not any(data.share_of(source) for source in sources.values()):
        return Rule(data)
    missing = {"train"} | {"validation" for source in sources.values() if data.measured_share_of(source)}
    sizes: dict[str, Counter[bytes]] = {name: Counter() for name in sources}
    first_in: dict[bytes, str] = {}  # a document counts where it is first
    by_hash = Rule(data)
    for name, source in sources.items():
        for document in corpus.documents(name, source, on_bad_row=data.on_bad_row, bad=Counter()):
            if not document.num_bytes:
                continue
            sizes[first_in.setdefault(document.key, name)][document.key] += document.num_bytes
            ((_, held_out),) = by_hash.parts(source, document)
            if held_out and by_hash.measured(source, document):
                missing.discard("validation")
            if not held_out and corpus.packs(document.digest, source.weight, data.seed):
                missing.discard("train")
            if not missing:
                return by_hash
    talk = isinstance(data, Conversations)
    last = LastParts(set(), {})
    for name, found in sizes.items():
        _hold_out_last_part(last, found, data.share_of(sources[name]), talk)
    return Rule(data, last, _says(data, sizes, last))


def _hold_out_last_part(last: LastParts, sizes: Counter[bytes], share: float, talk: bool) -> None:
    """Add the last part of a source with documents of these sizes, by key in the order of their first appearance."""
    wanted = share * sizes.total()
    if not wanted or (wanted < LEAST and not talk):
        return
    *others, first = reversed(sizes)  # the first document stays, at least a part of it
    count = got = 0
    for key in others:
        if got >= wanted or (got + sizes[key] > (1 + SLACK) * wanted and not (talk and count == 0)):
            break
        count += 1
        got += sizes[key]
    last.whole.update(others[:count])
    if not talk and got < (1 - SLACK) * wanted:
        border = [*others, first][count]
        last.cut[border] = (wanted - got) / sizes[border], SLACK * wanted / sizes[border]


def _cut(text: str, share: float, slack: float) -> int:
    """Where about the last ``share`` of a text begins, ``slack`` of it before or after; at least one character a side.

    At the best border in this stretch, and of equally good ones at the nearest.
    """
    length = len(text)
    wanted = min(max(1, round(length * (1 - share))), length - 1)
    first, last = (min(max(1, round(length * (1 - share + way * slack))), length - 1) for way in (-1, 1))
    for border in _BORDERS:
        ends = [found.end() for found in border.finditer(text, first - 1, last) if first <= found.end() < length]
        if ends:
            return min(ends, key=lambda end: abs(end - wanted))
    return wanted


def _part(text: str, row: int) -> Document:
    """A part of a document as a document of its own."""
    data = text.encode()
    digest = hashlib.sha256(data).digest()
    return Document(text, digest, digest, len(data), row)


def _says(data: Data, sizes: dict[str, Counter[bytes]], found: LastParts) -> str:
    talk = isinstance(data, Conversations)
    what, count = "conversation" if talk else "document", sum(map(len, sizes.values()))
    size = sum(of_source.total() for of_source in sizes.values())
    if not (found.whole or found.cut):
        plural = "" if count == 1 else "s"
        return f"no validation: {count:,} {what}{plural}, {size:,} B in all, too little to hold some of it out"
    shares = {data.share_of(source) for source in data.resolved_sources().values() if source.weight > 0}
    about = " to ".join(f"{share:.3g}" for share in sorted({min(shares), max(shares)}))
    last = "the last ones are held out" if talk else "the last part of the text is held out"
    return f"too few {what}s ({count:,}) to choose some by hash: {last}, a share of about {about}"
