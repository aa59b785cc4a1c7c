"""A terminal or a pipe that has gone ends no run: what is written there is dropped."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # for good; a full disk may have room again


class Forgiving(io.RawIOBase):
    """A file descriptor whose failures to write are passed over."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal, as long as that is there."""
        return os.isatty(self._descriptor)

    def write(self, data) -> int:
        """Writes what can be written, and says that it was all of it."""
        left = memoryview(data).cast("B")
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                if error.errno in GONE:
                    _to_nowhere(self._descriptor)
                break
        return memoryview(data).nbytes


@contextmanager
def forgiving() -> Iterator[None]:
    """Standard output and error drop what nobody is there to read."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would get its number, and what is said with it
            _to_nowhere(descriptor)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_forgiving(stream, number) for number, stream in enumerate(before, 1))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _forgiving(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # closed before Python began
        return io.TextIOWrapper(io.BufferedWriter(Forgiving(descriptor)), encoding="utf-8", line_buffering=True)
    try:
        if stream.fileno() != descriptor:
            return stream  # a file in its place: its failures are somebody's
        stream.flush()
    except io.UnsupportedOperation:  # no file at all
        return stream
    except (OSError, ValueError):  # gone already
        if not isinstance(stream, io.TextIOWrapper):
            return stream
    return io.TextIOWrapper(
        io.BufferedWriter(Forgiving(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or descriptor == 2,
    )


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
