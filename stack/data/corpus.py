"""Text in, through ``datasets``: local files and hub sets as one stream of documents, and what is held out of it.

A document is a text, or of a :class:`~stack.config.TalkSource` a conversation, in any format of
:mod:`stack.data.formats`.

=============================  =================================================================================
``*.jsonl`` ``*.ndjson``       one JSON object a line, the text in a field of it. Records end at LF only: CR,
                               U+0085 and U+2028 may stand inside one. Blank lines hold nothing and are passed over.
``*.parquet``                  one document a row, the text in a column
``*.txt``                      one document a file, whole and unchanged but for a byte order mark; no conversations
``.gz .bz2 .xz .zst``          behind ``.jsonl``, ``.ndjson`` and ``.txt``, decompressed while reading
a hub set, a data set folder   whatever ``datasets.load_dataset`` reads, streamed or not; one document a row
=============================  =================================================================================
"""

from __future__ import annotations

import glob
import hashlib
import json
import lzma
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from stack.config import Hub, Source, TalkSource, UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow

    from stack.conversation import Message

BATCH = 100  # rows taken from a data set at a time
JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MADE_OF = "document"  # the field of a conversation that names the document which it is made of


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


class BadRow(Exception):
    """A row that holds no text; the message is the reason under which it is counted."""


def documents(
    name: str,
    source: Source,
    *,
    on_bad_row: Literal["skip", "error"],
    start: int = 0,
    bad: Counter[str],
    first: dict[str, str] | None = None,
) -> Iterator[Document]:
    """The documents of a source in stored order, from row ``start`` on, up to ``source.max_mb`` of text.

    The document that reaches ``max_mb`` (counted from row 0) is the last one. Rows without text, or without a good
    conversation, are counted in ``bad`` by reason (``first`` learns where a reason is met first, and which fields that
    row has), or end the reading with a UserError that names file and line (from 1). An empty text is a document.
    UserError too where something cannot be found or read; ``name`` is the source's, for these messages.
    """
    limit = None if source.max_mb is None else source.max_mb * 1e6
    make = _conversation if isinstance(source, TalkSource) else _text
    size = 0
    for row, (place, stored, parse) in enumerate(_records(name, source)):
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
                raise UserError(
                    f"source {name}: {place()}: {problem} (field {source.text!r}); "
                    f"mend it, or skip and count such rows with {_group(source)}.on_bad_row=skip"
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
            return


def _group(source: Source) -> str:
    """The configuration group that a source is of, for messages."""
    return "chat" if isinstance(source, TalkSource) else "data"


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


def fingerprint(source: Source) -> dict[str, Any]:
    """What identifies the text of a source: the content of its files, or the name and revision of the hub set."""
    content: dict[str, Any]
    if source.hub is not None:
        hub = source.hub
        content = {"hub": {"path": hub.path, "name": hub.name, "split": hub.split, "revision": hub.revision}}
        if Path(hub.path).is_dir():
            content["files"] = [_identity(path) for path in sorted(Path(hub.path).rglob("*")) if path.is_file()]
    else:
        content = {"files": [_identity(path) for path in resolve_files(source.files, _group(source))]}
    own_share = {} if source.validation is None else {"validation": source.validation}
    talk = {"format": source.format, "reasoning": source.reasoning} if isinstance(source, TalkSource) else {}
    return content | {"text": source.text, "weight": source.weight, "max_mb": source.max_mb} | own_share | talk


def _identity(path: Path) -> dict[str, Any]:
    """Name, size and digest of a file; not its folder, so that a corpus may be moved."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def resolve_files(patterns: tuple[str, ...], group: str = "data") -> list[Path]:
    """The files that names and glob patterns stand for: patterns in their order, matches sorted, each file once.

    UserError for a name or pattern without a file, a folder, or a suffix that is not read; ``group`` is the
    configuration group whose flags it names.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        written = Path(pattern).expanduser()
        names = [str(written)] if written.exists() else sorted(glob.glob(str(written), recursive=True))
        if not names:
            raise UserError(f"{pattern}: there is no such file (looked in {Path.cwd()}); change {group}.files")
        for name in names:
            path = Path(name)
            if path.is_dir():
                raise UserError(f"{path} is a folder; name its files: {group}.files=['{path}/*.jsonl']")
            _suffix(path)
            found[path] = None
    return list(found)


def expected_bytes(source: Source) -> float | None:
    """About how much text a source has, None where that is not known before reading it: of compressed files, say.

    UserError as :func:`resolve_files` has it.
    """
    files = resolve_files(source.files)
    plain = bool(files) and all(file.suffix in (".txt", *JSON_LINES) for file in files)
    in_files = float(sum(file.stat().st_size for file in files)) if plain else None
    bounds = [in_files, None if source.max_mb is None else source.max_mb * 1e6]
    return min((bound for bound in bounds if bound is not None), default=None)


def _suffix(path: Path) -> str:
    """``.jsonl``, ``.ndjson``, ``.txt`` or ``.parquet``, compressed or not; UserError for any other."""
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    if inner.suffix in (*JSON_LINES, ".txt") or path.suffix == ".parquet":
        return inner.suffix
    known = f"{', '.join((*JSON_LINES, '.txt'))} (also behind these: {', '.join(COMPRESSED)}) and .parquet"
    raise UserError(f"{path}: text is not read from {path.suffix or 'a file without suffix'}; read are {known}")


# ---------------------------------------------------------------- rows

# Where a record stands (asked for only when it is bad), what is stored there, and what makes a record of it: the fields
# and their values, None for no record. A string may come as its bytes.
Row = tuple[Callable[[], str], Any, Callable[[Any], dict[str, Any] | None]]


def _records(name: str, source: Source) -> Iterator[Row]:
    """Every row of a source, unread; UserError where it cannot be opened or breaks off."""
    if source.hub is not None:
        yield from _guarded(f"source {name}: {source.hub.path}", lambda: _hub_rows(source.hub, source))
        return
    # The lock files that datasets leaves for each file that it opens go here, and away again.
    with tempfile.TemporaryDirectory() as cache:
        for path in resolve_files(source.files, _group(source)):
            yield from _guarded(f"source {name}: {path}", lambda path=path: _file_rows(path, source, cache))


def _guarded(what: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows; what the libraries raise over damaged or absent data becomes a UserError that names the file or set."""
    import pyarrow
    import zstandard
    from datasets.exceptions import DatasetsError

    damage = (DatasetsError, OSError, EOFError, ValueError)
    damage += (zlib.error, lzma.LZMAError, zstandard.ZstdError, pyarrow.ArrowException)
    try:
        yield from rows()
    except UserError:
        raise
    except damage as error:
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def _datasets() -> ModuleType:
    """The library. Imported where text is read, because it takes seconds and a finished stage reads none."""
    import datasets

    datasets.disable_progress_bars()  # the program shows its own
    return datasets


def _file_rows(path: Path, source: Source, cache: str) -> Iterator[Row]:
    """The rows of one file."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        found = _datasets().load_dataset(
            "parquet", data_files=glob.escape(str(path)), split="train", streaming=True, cache_dir=cache
        )
        yield from _table_rows(found, source, str(path))
        return
    from stack.data.lines import Lines

    whole = suffix == ".txt"
    lines = Lines(file=str(path), whole=whole, cache_dir=cache).as_streaming_dataset("train")
    parse = (lambda text: {source.text: text}) if whole else _json_record
    number = 0
    for table in lines.with_format("arrow").iter(BATCH):
        for line in table["line"].to_pylist():
            number += 1
            record = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            yield (lambda number=number: str(path) if whole else f"{path}, line {number}"), record, parse


def _hub_rows(hub: Hub, source: Source) -> Iterator[Row]:
    """The rows of a hub set or of a local data set folder."""
    found = _datasets().load_dataset(
        hub.path, hub.name, split=hub.split, revision=hub.revision, streaming=hub.streaming
    )
    yield from _table_rows(found, source, hub.path)


def _table_rows(found: datasets.Dataset | datasets.IterableDataset, source: Source, place: str) -> Iterator[Row]:
    """The column of a data set, and of conversations those that may say something.

    Strings come as their bytes, and lists as what arrow holds of them, so that a broken one does not end the reading.
    Of the other columns of conversations only the names are known, with a value of True.
    """
    import pyarrow

    talk = isinstance(source, TalkSource)
    wanted = {source.text, *(_fields_of_conversations() if talk else ())}
    named = list(found.column_names or ())
    others = dict.fromkeys((name for name in named if talk and name not in wanted), True)
    if wanted & set(named):
        found = found.select_columns([name for name in named if name in wanted])
    number = 0
    for table in found.with_format("arrow").iter(BATCH):
        other_form = talk and source.text == TalkSource.text and wanted & set(table.column_names)
        if source.text not in table.column_names and not other_form:
            way_out = f"give {_group(source)}.text=…"
            raise UserError(f"{place}: there is no field {source.text!r}; there are {table.column_names}: {way_out}")
        columns = {name: table[name] for name in wanted if name in table.column_names}
        for name, column in columns.items():
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                columns[name] = column.cast(pyarrow.large_binary())
        for values in zip(*columns.values(), strict=True):
            number += 1
            record = dict(zip(columns, values, strict=True))
            yield (lambda number=number: f"{place}, row {number}"), record, lambda record: _plain(record) | others


def _fields_of_conversations() -> set[str]:
    from stack.data.formats import FIELDS  # it reads from this module

    return FIELDS


# ---------------------------------------------------------------- records


def _json_record(line: bytes) -> dict[str, Any] | None:
    """The object of a line of JSON; None for a blank line."""
    if not line.strip():
        return None
    try:
        record = json.loads(_decoded(line))
    except (ValueError, RecursionError):  # a number of 10,000 digits; brackets 10,000 deep
        raise BadRow("not JSON") from None
    if not isinstance(record, dict):
        raise BadRow("not an object")
    return record


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The values of arrow as Python's."""
    try:
        return {name: _python(value.as_py(), value.type) for name, value in record.items()}
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadRow("not JSON") from None


def _python(value: Any, kind: pyarrow.DataType) -> Any:
    """A value of arrow as it was before all rows of its column were made alike.

    Every struct has the keys of all others, null where they are not its own: these are left out. Where rows are too
    unlike each other, ``datasets`` stores JSON.
    """
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict):
        return {f.name: _python(value[f.name], f.type) for f in kind if value[f.name] is not None}
    is_list = isinstance(value, list) and not isinstance(kind, pyarrow.MapType)
    return [_python(inner, kind.value_type) for inner in value] if is_list else value


def _text(record: dict[str, Any], source: Source, row: int) -> Document:
    if source.text not in record:
        raise BadRow("no text field")
    text = _string(record[source.text])
    data = _utf8(text)
    digest = hashlib.sha256(data).digest()
    return Document(text, digest, digest, len(data), row)


def _conversation(record: dict[str, Any], source: TalkSource, row: int) -> Document:
    from stack.conversation import canonical, check  # it knows the control tokens, whose module reads text from here
    from stack.data.formats import messages_of

    record = {name: _decoded(value) if isinstance(value, bytes) else value for name, value in record.items()}
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
        return _decoded(value)
    if isinstance(value, str):
        return value
    raise BadRow("null" if value is None else "not a string")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None


def _utf8(text: str) -> bytes:
    """UTF-8 of a text; half of a surrogate pair (``"\\\\ud800"`` in JSON) has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("lone surrogate") from None
