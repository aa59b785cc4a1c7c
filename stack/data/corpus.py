"""Text in, through ``datasets``: local files and hub sets as one stream of documents, and what is held out of it.

=============================  =================================================================================
``*.jsonl`` ``*.ndjson``       one JSON object a line, the text in a field of it. Records end at LF only: CR,
                               U+0085 and U+2028 may stand inside one. Blank lines hold nothing and are passed over.
``*.parquet``                  one document a row, the text in a column
``*.txt``                      one document a file, whole and unchanged but for a byte order mark
``.gz .bz2 .xz .zst``          behind ``.jsonl``, ``.ndjson`` and ``.txt``, decompressed while reading
a hub set, a data set folder   whatever ``datasets.load_dataset`` reads, streamed or not; one document a row
=============================  =================================================================================
"""

from __future__ import annotations

import glob
import hashlib
import json
import lzma
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from stack.config import Hub, Source, UserError

if TYPE_CHECKING:
    import datasets

BATCH = 100  # rows taken from a data set at a time
JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class Document:
    """A text, the SHA-256 of its UTF-8 (32 bytes), and the index of its row in the source."""

    text: str
    key: bytes
    row: int


class BadRow(Exception):
    """A row that holds no text; the message is the reason under which it is counted."""


def documents(
    name: str, source: Source, *, on_bad_row: Literal["skip", "error"], start: int = 0, bad: Counter[str]
) -> Iterator[Document]:
    """The documents of a source in stored order, from row ``start`` on, up to ``source.max_mb`` of text.

    The document that reaches ``max_mb`` (counted from row 0) is the last one. Rows without text are counted in
    ``bad`` by reason, or end the reading with a UserError that names file and line (from 1). An empty text is a
    document. UserError too where something cannot be found or read; ``name`` is the source's, for these messages.
    """
    limit = None if source.max_mb is None else source.max_mb * 1e6
    size = 0
    for row, (place, record, parse) in enumerate(_records(name, source)):
        if row < start and limit is None:
            continue
        try:
            text = parse(record, source.text)
            data = None if text is None else _utf8(text)
        except BadRow as problem:
            if row < start:
                continue
            if on_bad_row == "error":
                way_out = "mend it, or skip and count such rows with data.on_bad_row=skip"
                raise UserError(
                    f"source {name}: {place()}: {problem} (text field {source.text!r}); {way_out}"
                ) from None
            bad[str(problem)] += 1
            continue
        if text is None or data is None:
            continue
        if row >= start:
            yield Document(text, hashlib.sha256(data).digest(), row)
        size += len(data)
        if limit is not None and size >= limit:
            return


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
        content = {"files": [_identity(path) for path in resolve_files(source.files)]}
    return content | {"text": source.text, "weight": source.weight, "max_mb": source.max_mb}


def _identity(path: Path) -> dict[str, Any]:
    """Name, size and digest of a file; not its folder, so that a corpus may be moved."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def resolve_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that names and glob patterns stand for: patterns in their order, matches sorted, each file once.

    UserError for a name or pattern without a file, a folder, or a suffix that is not read.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        written = Path(pattern).expanduser()
        names = [str(written)] if written.exists() else sorted(glob.glob(str(written), recursive=True))
        if not names:
            raise UserError(f"{pattern}: there is no such file (looked in {Path.cwd()}); change data.files")
        for name in names:
            path = Path(name)
            if path.is_dir():
                raise UserError(f"{path} is a folder; name its files: data.files=['{path}/*.jsonl']")
            _suffix(path)
            found[path] = None
    return list(found)


def _suffix(path: Path) -> str:
    """``.jsonl``, ``.ndjson``, ``.txt`` or ``.parquet``, compressed or not; UserError for any other."""
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    if inner.suffix in (*JSON_LINES, ".txt") or path.suffix == ".parquet":
        return inner.suffix
    known = f"{', '.join((*JSON_LINES, '.txt'))} (also behind these: {', '.join(COMPRESSED)}) and .parquet"
    raise UserError(f"{path}: text is not read from {path.suffix or 'a file without suffix'}; read are {known}")


# ---------------------------------------------------------------- rows

# Where a record stands (asked for only when it is bad), the record, and what finds the text in it: None for no record.
Row = tuple[Callable[[], str], Any, Callable[[Any, str], str | None]]


def _records(name: str, source: Source) -> Iterator[Row]:
    """Every row of a source, unread; UserError where it cannot be opened or breaks off."""
    if source.hub is not None:
        yield from _guarded(f"source {name}: {source.hub.path}", lambda: _hub_rows(source.hub, source.text))
        return
    # The lock files that datasets leaves for each file that it opens go here, and away again.
    with tempfile.TemporaryDirectory() as cache:
        for path in resolve_files(source.files):
            yield from _guarded(f"source {name}: {path}", lambda path=path: _file_rows(path, source.text, cache))


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


def _file_rows(path: Path, field: str, cache: str) -> Iterator[Row]:
    """The rows of one file."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        found = _datasets().load_dataset(
            "parquet", data_files=glob.escape(str(path)), split="train", streaming=True, cache_dir=cache
        )
        yield from _table_rows(found, field, str(path))
        return
    from stack.data.lines import Lines

    whole = suffix == ".txt"
    lines = Lines(file=str(path), whole=whole, cache_dir=cache).as_streaming_dataset("train")
    parse = _value_text if whole else _json_text
    number = 0
    for table in lines.with_format("arrow").iter(BATCH):
        for line in table["line"].to_pylist():
            number += 1
            record = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            yield (lambda number=number: str(path) if whole else f"{path}, line {number}"), record, parse


def _hub_rows(hub: Hub, field: str) -> Iterator[Row]:
    """The rows of a hub set or of a local data set folder."""
    found = _datasets().load_dataset(
        hub.path, hub.name, split=hub.split, revision=hub.revision, streaming=hub.streaming
    )
    yield from _table_rows(found, field, hub.path)


def _table_rows(found: datasets.Dataset | datasets.IterableDataset, field: str, place: str) -> Iterator[Row]:
    """One column of a data set. Strings come as their bytes, so that one broken one does not end the reading."""
    import pyarrow

    if field in (found.column_names or ()):
        found = found.select_columns([field])
    number = 0
    for table in found.with_format("arrow").iter(BATCH):
        if field not in table.column_names:
            raise UserError(f"{place}: there is no field {field!r}; there are {table.column_names}: give data.text=…")
        column = table[field]
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            column = column.cast(pyarrow.large_binary())
        for value in column.to_pylist():
            number += 1
            yield (lambda number=number: f"{place}, row {number}"), value, _value_text


# ---------------------------------------------------------------- the text of a row


def _json_text(line: bytes, field: str) -> str | None:
    """The text field of a line of JSON; None for a blank line."""
    if not line.strip():
        return None
    try:
        record = json.loads(_decoded(line))
    except (ValueError, RecursionError):  # a number of 10,000 digits; brackets 10,000 deep
        raise BadRow("not JSON") from None
    if not isinstance(record, dict):
        raise BadRow("not an object")
    if field not in record:
        raise BadRow("no text field")
    if isinstance(record[field], str):
        return record[field]
    raise BadRow("null" if record[field] is None else "not a string")


def _value_text(value: Any, field: str) -> str:
    """The text of a value of a column, or of a whole file."""
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
