"""The rows of a source as they are stored: of files, of parquet, and of data sets by ``datasets``."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack.config.schema import ConversationSource, Hub, Source
from stack.core.errors import BadRow, UserError
from stack.data import files, lines
from stack.data.files import File, hold
from stack.data.formats import FIELDS

if TYPE_CHECKING:
    import pyarrow

BATCH = 100  # rows taken from a data set at a time

# Where a record stands (asked for only when it is bad), what is stored there, and what makes a record of it: the fields
# and their values, None for no record. A string may come as its bytes.
Row = tuple[Callable[[], str], Any, Callable[[Any], dict[str, Any] | None]]


def group_of(source: Source) -> str:
    """The configuration group that a source is of, for messages."""
    return "chat" if isinstance(source, ConversationSource) else "data"


def folder_of(hub: Hub) -> Path | None:
    """The folder that a data set is, None of one on the hub."""
    path = Path(os.path.expanduser(hub.path))
    return path if os.path.isdir(path) else None


def records(name: str, source: Source, of: tuple[File, ...]) -> Iterator[Row]:
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
        hold(of)
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
        str(folder_of(hub) or hub.path),
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
    """The rows of a table: the column of the text, of conversations all columns that have a meaning.

    ``names`` are its columns where they are known, and ``tables`` gives those that it is asked for, or all. Strings
    come as their bytes, and lists as what arrow holds of them, so that a broken one does not end the reading. Of the
    other columns of conversations only the names are known, with a value of True.
    """
    import pyarrow

    talk, named = isinstance(source, ConversationSource), list(names)
    wanted = {source.text, *(FIELDS if talk else ())}
    others = dict.fromkeys((name for name in named if talk and name not in wanted), True)
    number = 0
    for table in tables([name for name in named if name in wanted] or None):
        other_form = talk and source.text == ConversationSource.text and wanted & set(table.column_names)
        if source.text not in table.column_names and not other_form:
            way_out = f"give {group_of(source)}.text=…"
            raise UserError(f"{place}: there is no field {source.text!r}; there are {table.column_names}: {way_out}")
        columns = {name: table[name] for name in wanted if name in table.column_names}
        for name, column in columns.items():
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                columns[name] = column.cast(pyarrow.large_binary())
        for values in zip(*columns.values(), strict=True):
            number += 1
            record = dict(zip(columns, values, strict=True))
            yield (lambda number=number: f"{place}, row {number}"), record, lambda record: _plain(record) | others


def _json_record(line: bytes) -> dict[str, Any] | None:
    """The object of a line of JSON; None for a blank line."""
    if not line.strip():
        return None
    try:
        return _object(json.loads(decoded(line)))
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


def decoded(data: bytes) -> str:
    """The text of UTF-8; :class:`~stack.core.errors.BadRow` for other bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
