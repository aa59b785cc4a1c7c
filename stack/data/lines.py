"""The content of a file of text: decompressed as far as its frames say, and parted into lines or JSON values.

The readers of the standard library take a compressed file's tail that they cannot read for its end. That of
``zstandard``, and so ``fsspec``'s, takes any end: of half a file of 20,000 rows it gave 6,294 without a word. Here
every frame must end, and behind a frame stands another one or nothing.
"""

from __future__ import annotations

import bz2
import codecs
import hashlib
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from stack.data import files
from stack.data.files import File

CHUNK = files.CHUNK
FEED = 1 << 12  # compressed bytes taken at a time: zeros in .zst become 32,000 times as many
_WHITE = re.compile(r"[ \t\r\n\ufeff]*")
_LONGEST_MARK = 16  # -Infinity, \\ud83d\\ude00: a value that is torn inside one is found wrong where that begins


class Damaged(ValueError):
    """What a file cannot hold, or lacks."""


def content(file: File) -> Iterator[bytes]:
    """The bytes of a file, decompressed, in parts of about a megabyte.

    :class:`Damaged` where a frame does not end; UserError where it is not what it was when its snapshot was taken.
    """
    packing = files.kind(file.path)[1]
    hashed, size = hashlib.sha256(), 0

    def raw(count: int) -> Iterator[bytes]:
        nonlocal size
        with file.path.open("rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK):
                if file.sha256 is not None:
                    hashed.update(chunk)
                size += len(chunk)
                if size > file.size:
                    file.check()  # now, as it may grow for ever
                yield from (chunk[at : at + count] for at in range(0, len(chunk), count))

    yield from _gathered(decompressed(raw(FEED), packing)) if packing else raw(CHUNK)
    if file.sha256 is not None:
        file.hold(size, hashed.hexdigest())


def _gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger parts."""
    some, size = [], 0
    for part in parts:
        some.append(part)
        size += len(part)
        if size >= CHUNK:
            yield b"".join(some)
            some, size = [], 0
    yield b"".join(some)


def decompressed(parts: Iterable[bytes], suffix: str) -> Iterator[bytes]:
    """What ``.gz .bz2 .xz .zst`` hold, frame after frame; :class:`Damaged` unless every frame is whole.

    Zeros behind a frame of ``.gz`` and ``.xz`` are padding.
    """
    import zstandard

    start = {
        ".gz": lambda: zlib.decompressobj(wbits=31),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
        ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),  # zstd --long=31
    }[suffix]
    frame, whole = None, 0
    for part in parts:
        while part:
            if frame is None:
                part = part.lstrip(b"\0") if whole and suffix in (".gz", ".xz") else part
                frame = start() if part else None
                continue
            try:
                yield frame.decompress(part)
            except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                where = f"what stands behind {whole} whole {suffix} frames" if whole else f"this {suffix}"
                raise Damaged(f"{where} is damaged ({error})") from error
            part = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, whole = None, whole + 1
    if frame is not None or not whole:
        what = "it is empty" if frame is None else f"it ends inside its {suffix} frame {whole + 1}"
        raise Damaged(f"{what}: the file is cut")


def lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without their LF, which alone ends one; the last may lack it."""
    begun: list[bytes] = []  # of a line that is longer than a part
    for part in parts:
        first, *more = part.split(b"\n")
        begun.append(first)
        if more:
            yield b"".join(begun)
            yield from more[:-1]
            begun = [more[-1]]
    if last := b"".join(begun):
        yield last


def array_or_lines(parts: Iterable[bytes]) -> Iterator[Any]:
    """Of ``.json``: the elements of the array that it is, as values, or else its lines, as bytes."""
    parts = iter(parts)
    begun = b""
    for part in parts:
        begun += part
        if len(begun) >= len(codecs.BOM_UTF8) and begun.removeprefix(codecs.BOM_UTF8).strip():
            break
    is_array = begun.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    whole = itertools.chain([begun], parts)
    return array(whole) if is_array else lines(whole)


def array(parts: Iterable[bytes]) -> Iterator[Any]:
    """The elements of an array of JSON; :class:`Damaged` where it is none, or does not end.

    Memory holds a part and an element.
    """
    text = _Text(parts)
    number, mark = 0, text.mark()
    while mark == ("," if number else "["):
        text.at += 1
        if number or text.mark() != "]":
            number += 1
            yield text.value(number)
        mark = text.mark()
        if mark == "]":
            text.at += 1
            if text.mark():
                raise Damaged("more stands behind the array of its records")
            return
    raise Damaged(f"after record {number:,} of its array stands {mark!r}" if mark else _CUT.format(number))


_CUT = "the array of its records does not end behind record {:,}: the file is cut"


class _Text:
    """A text that comes in parts, and a place in it."""

    def __init__(self, parts: Iterable[bytes]):
        self.at = 0
        self._text, self._ended, self._parts = "", False, iter(parts)
        # A byte that is no UTF-8 becomes half of a surrogate pair: one bad row, not a bad file.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._value = json.JSONDecoder().raw_decode

    def mark(self) -> str:
        """Moves to the next character that is not white space and returns it; an empty text at the end."""
        while True:
            self.at = _WHITE.match(self._text, self.at).end()
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._grow()

    def value(self, number: int) -> Any:
        """Reads the JSON value that begins here and moves behind it."""
        self.mark()
        while True:
            try:
                found, end = self._value(self._text, self.at)
                if end < len(self._text) or self._ended:  # else a number may go on
                    self.at = end
                    return found
            except json.JSONDecodeError as error:
                torn = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _LONGEST_MARK
                if self._ended or not torn:
                    raise Damaged(f"record {number:,} of its array is damaged or cut ({error.msg})") from None
            except (ValueError, RecursionError) as error:  # a number of 10,000 digits; brackets 10,000 deep
                raise Damaged(f"record {number:,} of its array is no JSON ({error})") from None
            self._grow()

    def _grow(self) -> None:
        rest = self._text[self.at :]
        some, size = [rest], 0
        while not self._ended and size <= len(rest):  # doubled, so that a long value is not read over too often
            part = next(self._parts, b"")
            self._ended = not part
            some.append(self._decoder.decode(part, self._ended))
            size += len(some[-1])
        self._text, self.at = "".join(some), 0
