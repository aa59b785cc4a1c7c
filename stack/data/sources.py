"""Text in: local files, and through ``datasets`` hub sets, as one stream of documents, and what is held out of it.

A document is a text, or of a :class:`~stack.config.schema.ConversationSource` a conversation, in any format of
:mod:`stack.data.formats`.

=============================  =================================================================================
``*.jsonl`` ``*.ndjson``       one JSON object a line, the text in a field of it. Records end at LF only: CR,
                               U+0085 and U+2028 may stand inside one. Blank lines hold nothing and are passed over.
``*.json``                     the same, or one array of such objects
``*.parquet``                  one document a row, the text in a column
``*.txt``                      one document a file, whole and unchanged but for a byte order mark; no conversations
``.gz .bz2 .xz .zst``          behind all of these but ``.parquet``, decompressed while reading
a hub set, a data set folder   whatever ``datasets.load_dataset`` reads, streamed or not; one document a row
=============================  =================================================================================
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stack.config.schema import ConversationSource, Source
from stack.core.errors import BadRow, UserError
from stack.data import files
from stack.data.files import File, Found, hold
from stack.data.formats import MADE_OF, messages_of
from stack.data.rows import decoded, folder_of, group_of, records
from stack.text.messages import Message, canonical, check

if TYPE_CHECKING:
    pass

PLAIN = tuple((suffix, "") for suffix in (".txt", *files.JSON_LINES))


@dataclass(frozen=True)
class Document:
    """A text or a conversation."""

    content: str | list[Message]
    digest: bytes  # SHA-256 of its UTF-8, of a conversation's as JSON; 32 bytes
    key: bytes  # by which it is held out: the digest, or of a conversation that of the document which it is made of
    num_bytes: int  # of its UTF-8, of a conversation's as JSON
    row: int  # in the source
    passed_over: Mapping[str, int] = field(default_factory=dict)  # of a conversation's record: how often, by name

    @property
    def text(self) -> str:
        """The content of a document that is a text."""
        assert isinstance(self.content, str), "a conversation is no text"
        return self.content


@dataclass(frozen=True)
class Known:
    """A source at the moment of its snapshot."""

    fingerprint: dict[str, Any]  # what identifies its text: digests of its files, or name and revision of the hub set
    files: tuple[File, ...]  # none of a hub set that is not here
    said: str | None  # what a person should know of how its files were found

    def check(self) -> None:
        """Raises :class:`~stack.data.files.Changed` where a file is not what it was at the snapshot."""
        hold(self.files)


def snapshot(source: Source) -> Known:
    """The source as it is; UserError where a file cannot be found or read.

    A file's identity is its name, size and digest; not its folder, so that a corpus may be moved.
    """
    found, here = _local(source)
    seen = tuple(map(files.snapshot, found.files))
    content: dict[str, Any] = {}
    if source.hub is not None:
        hub = source.hub
        content = {"hub": {"path": hub.path, "name": hub.name, "split": hub.split, "revision": hub.revision}}
    if here:
        content["files"] = [file.identity() for file in seen]
    own_share = {} if source.validation is None else {"validation": source.validation}
    content |= {"text": source.text, "weight": source.weight, "max_mb": source.max_mb} | own_share
    if isinstance(source, ConversationSource):
        content |= {"format": source.format, "reasoning": source.reasoning}
    return Known(content, seen, found.said() if source.hub is None else _linked(found.files))


def _linked(paths: list[Path]) -> str | None:
    """What a person should know of a data set folder, whose names are for the library to choose from."""
    again = len(paths) - len(set(map(files.identity, paths)))
    said = (
        f"{again:,} of the names in this folder are links to another file in it; the datasets library reads each name"
    )
    return said if again else None


def fingerprint(source: Source) -> dict[str, Any]:
    """What identifies the text of a source, as :func:`snapshot` has it."""
    return snapshot(source).fingerprint


def _local(source: Source) -> tuple[Found, bool]:
    """The files that a source is made of, and whether it is on this machine at all."""
    if source.hub is None:
        return files.find(source.files, group_of(source)), True
    folder = folder_of(source.hub)
    if folder is None:
        return Found(), False
    odd = sorted(set("[]?*").intersection(str(folder.resolve()))) + ["::"] * ("::" in str(folder.resolve()))
    if odd:  # datasets takes it for a pattern, and reads what else matches
        raise UserError(
            f"{group_of(source)}.hub.path={source.hub.path}: the datasets library cannot read from a folder with "
            f"{' or '.join(odd)} in its path ({folder.resolve()}); rename it, or read its files by "
            f"{group_of(source)}.files={source.hub.path}"
        )
    return Found([path for path in sorted(folder.rglob("*")) if os.path.isfile(path)]), True


def documents(
    name: str,
    source: Source,
    *,
    on_bad_row: Literal["skip", "error"],
    start: int = 0,
    bad: Counter[str],
    known: Known | None = None,
    first: dict[str, str] | None = None,
) -> Iterator[Document]:
    """The documents of a source in stored order, from row ``start`` on, up to ``source.max_mb`` of text.

    The document that reaches ``max_mb`` (counted from row 0) is the last one. Rows without text, or without a good
    conversation, are counted in ``bad`` by reason (``first`` learns where a reason is met first, and which fields that
    row has), or end the reading with a UserError that names file and line (from 1). An empty text is a document.
    UserError too where something cannot be found or read, where a file is cut, and where one is not what it was when
    ``known`` was made (or, without it, when reading began); ``name`` is the source's, for these messages.
    """
    of = tuple(files.snapshot(path, digest=False) for path in _local(source)[0].files) if known is None else known.files
    limit = None if source.max_mb is None else source.max_mb * 1e6
    make = _conversation if isinstance(source, ConversationSource) else _text
    size = 0
    for row, (place, stored, parse) in enumerate(records(name, source, of)):
        if row < start and limit is None:
            continue
        record: dict[str, Any] | None = None
        try:
            record = parse(stored)
            document = None if record is None else make(record, source, row)
        except BadRow as problem:
            if row < start:
                continue
            if on_bad_row == "error":
                hold(of)
                raise UserError(
                    f"source {name}: {place()}: {problem} (field {source.text!r}); "
                    f"mend it, or skip and count such rows with {group_of(source)}.on_bad_row=skip"
                ) from None
            bad[str(problem)] += 1
            if first is not None and str(problem) not in first:
                first[str(problem)] = place() + (f", with the fields {', '.join(record)}" if record else "")
            continue
        if document is None:
            continue
        if row >= start:
            yield document
        size += document.num_bytes
        if limit is not None and size >= limit:
            break
    hold(of)


def held_out(key: bytes, share: float, seed: int) -> bool:
    """Whether the document or conversation of this key belongs to validation; true for about ``share`` of all keys."""
    return uniform(b"validation", key, seed) < share


def packs(key: bytes, weight: float, seed: int) -> int:
    """How often a document is packed: floor(weight), and once more with a chance of what is left of the weight."""
    whole = int(weight)
    return whole + (uniform(b"weight", key, seed) < weight - whole)


def uniform(purpose: bytes, key: bytes, seed: int) -> float:
    """A number in [0, 1) drawn from a document's key: the same everywhere, independent between purposes and seeds."""
    drawn = hashlib.sha256(b"%s %d " % (purpose, seed) + key).digest()
    return int.from_bytes(drawn[:6], "big") / 2**48  # 48 bits fit a float exactly, so 1.0 is never drawn


def expected_bytes(source: Source) -> float | None:
    """About how much text a source has, None where that is not known before reading it: of compressed files, say.

    UserError where a file cannot be found.
    """
    found = files.find(source.files, group_of(source)).files
    plain = bool(found) and all(files.kind(path) in PLAIN for path in found)
    in_files = float(sum(path.stat().st_size for path in found)) if plain else None
    bounds = [in_files, None if source.max_mb is None else source.max_mb * 1e6]
    return min((bound for bound in bounds if bound is not None), default=None)


def _text(record: dict[str, Any], source: Source, row: int) -> Document:
    if source.text not in record:
        raise BadRow("no text field")
    text = _string(record[source.text])
    data = _utf8(text)
    digest = hashlib.sha256(data).digest()
    return Document(text, digest, digest, len(data), row)


def _conversation(record: dict[str, Any], source: ConversationSource, row: int) -> Document:
    record = {name: decoded(value) if isinstance(value, bytes) else value for name, value in record.items()}
    found, passed_over = messages_of(record, source)
    messages, made_of = check(found), record.get(MADE_OF)
    data = canonical(messages)
    digest = hashlib.sha256(data).digest()
    if made_of is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", _string(made_of)):
        raise BadRow(f"{MADE_OF} is no SHA-256")
    key = digest if made_of is None else bytes.fromhex(_string(made_of))
    return Document(messages, digest, key, len(data), row, passed_over)


def _string(value: Any) -> str:
    """A string, which may come as its bytes."""
    if isinstance(value, bytes):
        return decoded(value)
    if isinstance(value, str):
        return value
    raise BadRow("null" if value is None else "not a string")


def _utf8(text: str) -> bytes:
    """UTF-8 of a text; half of a surrogate pair (``"\\\\ud800"`` in JSON) has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("lone surrogate") from None
