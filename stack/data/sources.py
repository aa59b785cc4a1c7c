"""Text in: local files, and through ``datasets`` hub sets, as one stream of documents, and what is held out of it.

A document is a text, or of a :class:`~stack.config.schema.TalkSource` a conversation, in any format of
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

import codecs
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stack.config.schema import Hub, Source, TalkSource
from stack.core.errors import BadRow, UserError
from stack.data import files, lines
from stack.data.files import File, Found
from stack.data.formats import MADE_OF, messages_of
from stack.text.messages import Message, canonical, check

if TYPE_CHECKING:
    import pyarrow

BATCH = 100  # rows taken from a data set at a time
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
    """A source as it was when it was looked at."""

    fingerprint: dict[str, Any]  # what identifies its text: digests of its files, or name and revision of the hub set
    files: tuple[File, ...]  # none of a hub set that is not here
    said: str | None  # what a person should know of how its files were found

    def check(self) -> None:
        """:class:`~stack.data.files.Changed` where a file is another one now, so that what was read has no name."""
        _hold(self.files)


def _hold(seen: Iterable[File]) -> None:
    """Raise where a file changed: that comes before anything that is wrong with a mixture of before and after."""
    for file in seen:
        file.check()


def look(source: Source) -> Known:
    """The source as it is; UserError where a file cannot be found or read.

    A file's identity is its name, size and digest; not its folder, so that a corpus may be moved.
    """
    found, here = _local(source)
    seen = tuple(map(files.look, found.files))
    content: dict[str, Any] = {}
    if source.hub is not None:
        hub = source.hub
        content = {"hub": {"path": hub.path, "name": hub.name, "split": hub.split, "revision": hub.revision}}
    if here:
        content["files"] = [file.identity() for file in seen]
    own_share = {} if source.validation is None else {"validation": source.validation}
    content |= {"text": source.text, "weight": source.weight, "max_mb": source.max_mb} | own_share
    if isinstance(source, TalkSource):
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
    """What identifies the text of a source, as :func:`look` has it."""
    return look(source).fingerprint


def _local(source: Source) -> tuple[Found, bool]:
    """The files that a source is made of, and whether it is on this machine at all."""
    if source.hub is None:
        return files.find(source.files, _group(source)), True
    folder = _folder(source.hub)
    if folder is None:
        return Found(), False
    odd = sorted(set("[]?*").intersection(str(folder.resolve()))) + ["::"] * ("::" in str(folder.resolve()))
    if odd:  # datasets takes it for a pattern, and reads what else matches
        raise UserError(
            f"{_group(source)}.hub.path={source.hub.path}: the datasets library cannot read from a folder with "
            f"{' or '.join(odd)} in its path ({folder.resolve()}); rename it, or read its files by "
            f"{_group(source)}.files={source.hub.path}"
        )
    return Found([path for path in sorted(folder.rglob("*")) if os.path.isfile(path)]), True


def _folder(hub: Hub) -> Path | None:
    """The folder that a data set is, None of one on the hub."""
    path = Path(os.path.expanduser(hub.path))
    return path if os.path.isdir(path) else None


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
    of = tuple(files.look(path, digest=False) for path in _local(source)[0].files) if known is None else known.files
    limit = None if source.max_mb is None else source.max_mb * 1e6
    make = _conversation if isinstance(source, TalkSource) else _text
    size = 0
    for row, (place, stored, parse) in enumerate(_records(name, source, of)):
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
                _hold(of)
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
            break
    _hold(of)


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


def expected_bytes(source: Source) -> float | None:
    """About how much text a source has, None where that is not known before reading it: of compressed files, say.

    UserError where a file cannot be found.
    """
    found = files.find(source.files, _group(source)).files
    plain = bool(found) and all(files.kind(path) in PLAIN for path in found)
    in_files = float(sum(path.stat().st_size for path in found)) if plain else None
    bounds = [in_files, None if source.max_mb is None else source.max_mb * 1e6]
    return min((bound for bound in bounds if bound is not None), default=None)


# ---------------------------------------------------------------- rows

# Where a record stands (asked for only when it is bad), what is stored there, and what makes a record of it: the fields
# and their values, None for no record. A string may come as its bytes.
Row = tuple[Callable[[], str], Any, Callable[[Any], dict[str, Any] | None]]


def _records(name: str, source: Source, of: tuple[File, ...]) -> Iterator[Row]:
    """Every row of a source, unread; UserError where it cannot be opened or breaks off."""
    if source.hub is not None:
        for file in of:  # of which the library takes what a cut one gives
            if file.path.suffix in files.COMPRESSED:
                yield from _guarded(name, file.path, (file,), _whole(file))
        yield from _guarded(name, source.hub.path, of, _hub_rows(source.hub, source, of))
        return
    for file in of:
        yield from _guarded(name, file.path, (file,), _file_rows(file, source))


def _guarded(name: str, what: Path | str, of: tuple[File, ...], rows: Iterator[Row]) -> Iterator[Row]:
    """The rows; what the libraries raise over damaged or absent data becomes a UserError that names the file or set."""
    try:
        yield from rows
    except UserError:
        raise
    except (OSError, EOFError, ValueError, *_errors()) as error:
        _hold(of)
        own = isinstance(error, lines.Damaged)
        why = f"{error}; get a whole copy of it" if own else f"{type(error).__name__}: {error}"
        raise UserError(f"source {name}: {files.shown(what)} cannot be read: {why}") from error


def _errors() -> Iterator[type[Exception]]:
    """What the libraries raise that are loaded; the others raise nothing."""
    if "pyarrow" in sys.modules:
        yield sys.modules["pyarrow"].ArrowException
    if "datasets" in sys.modules:
        from datasets.exceptions import DatasetsError

        yield DatasetsError


def _whole(file: File) -> Iterator[Row]:
    """No rows; :class:`~stack.data.lines.Damaged` where a compressed file is cut."""
    for _ in lines.content(file):
        pass
    yield from ()


def _file_rows(file: File, source: Source) -> Iterator[Row]:
    """The rows of one file."""
    place, suffix = files.shown(file.path), files.kind(file.path)[0]
    if suffix == ".parquet":
        yield from _parquet_rows(file, source, place)
        return
    content = lines.content(file)
    if suffix == ".txt":
        text = b"".join(content).removeprefix(codecs.BOM_UTF8)
        yield (lambda: place), text, lambda text: {source.text: text}
        return
    found = lines.array_or_lines(content) if suffix == ".json" else lines.lines(content)
    for number, record in enumerate(found, 1):
        if not isinstance(record, bytes):
            yield (lambda number=number: f"{place}, record {number}"), record, _object
            continue
        line = record.removeprefix(codecs.BOM_UTF8) if number == 1 else record
        yield (lambda number=number: f"{place}, line {number}"), line, _json_record


def _parquet_rows(file: File, source: Source, place: str) -> Iterator[Row]:
    """The rows of a parquet file, its pages read as they come."""
    import pyarrow
    import pyarrow.parquet

    # Opened here because the library takes some names for addresses.
    with (
        file.path.open("rb") as opened,
        pyarrow.parquet.ParquetFile(opened, buffer_size=files.CHUNK, pre_buffer=False) as found,
    ):

        def tables(columns: list[str] | None) -> Iterator[pyarrow.Table]:
            batches = found.iter_batches(BATCH, columns=columns)
            return (pyarrow.Table.from_batches([batch]) for batch in batches)

        yield from _table_rows(found.schema_arrow.names, tables, source, place)


def _hub_rows(hub: Hub, source: Source, of: tuple[File, ...]) -> Iterator[Row]:
    """The rows of a hub set or of a local data set folder."""
    import datasets  # where it is needed, because it takes seconds

    datasets.disable_progress_bars()  # the program shows its own
    # What is not streamed is kept, and the library knows a file here by its name and time alone.
    own = hashlib.sha256("".join(file.content for file in of).encode()).hexdigest()
    found = datasets.load_dataset(
        str(_folder(hub) or hub.path),
        hub.name,
        split=hub.split,
        revision=hub.revision,
        streaming=hub.streaming,
        cache_dir=os.path.join(datasets.config.HF_DATASETS_CACHE, own) if of else None,
    )

    def tables(columns: list[str] | None) -> Iterator[pyarrow.Table]:
        return (found if columns is None else found.select_columns(columns)).with_format("arrow").iter(BATCH)

    yield from _table_rows(found.column_names or (), tables, source, hub.path)


def _table_rows(
    names: Iterable[str], tables: Callable[[list[str] | None], Iterable[pyarrow.Table]], source: Source, place: str
) -> Iterator[Row]:
    """The column of a data set, and of conversations those that may say something.

    ``names`` are its columns where they are known, and ``tables`` gives those that it is asked for, or all. Strings
    come as their bytes, and lists as what arrow holds of them, so that a broken one does not end the reading. Of the
    other columns of conversations only the names are known, with a value of True.
    """
    import pyarrow

    talk, named = isinstance(source, TalkSource), list(names)
    wanted = {source.text, *(_fields_of_conversations() if talk else ())}
    others = dict.fromkeys((name for name in named if talk and name not in wanted), True)
    number = 0
    for table in tables([name for name in named if name in wanted] or None):
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
        return _object(json.loads(_decoded(line)))
    except (ValueError, RecursionError):  # a number of 10,000 digits; brackets 10,000 deep
        raise BadRow("not JSON") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow("not an object")
    return value


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
