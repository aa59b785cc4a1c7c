"""A builder for ``datasets`` whose rows are the lines of a file, as the bytes that they are.

The library's own builders cannot be used for text that may be damaged: ``json`` raises at the first bad line and
``text`` also ends a line at CR and fails at a byte that is not UTF-8. This one takes what they take from the library
(local, remote and compressed files, streaming) and ends a line at LF alone.

It stands alone in its module because ``datasets`` replaces names such as ``open`` in the module of a streaming builder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import datasets
import pyarrow

CHUNK = 1 << 20  # bytes read at a time


@dataclass
class LinesConfig(datasets.BuilderConfig):
    """Which file, and whether all of it is one row."""

    file: str = ""
    whole: bool = False


class Lines(datasets.ArrowBasedBuilder):
    """One split ``train`` with one column ``line`` (binary)."""

    BUILDER_CONFIG_CLASS = LinesConfig
    config: LinesConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"line": datasets.Value("large_binary")}))

    def _split_generators(self, dl_manager: datasets.StreamingDownloadManager) -> list[datasets.SplitGenerator]:
        file = dl_manager.download_and_extract(self.config.file)  # no copy is made: streaming decompresses as it reads
        return [datasets.SplitGenerator(name="train", gen_kwargs={"file": file})]

    def _generate_tables(self, file: str) -> Iterator[tuple[int, pyarrow.Table]]:
        with open(file, "rb") as stream:
            for number, lines in enumerate(whole(stream) if self.config.whole else split_at_lf(stream)):
                yield number, pyarrow.table({"line": pyarrow.array(lines, pyarrow.large_binary())})


def whole(stream) -> Iterator[list[bytes]]:
    """Everything as one line."""
    yield [b"".join(iter(lambda: stream.read(CHUNK), b""))]


def split_at_lf(stream) -> Iterator[list[bytes]]:
    """The lines without their LF, many at a time; the last one may lack it."""
    parts: list[bytes] = []  # of a line that is longer than a chunk
    while chunk := stream.read(CHUNK):
        first, *lines = chunk.split(b"\n")
        parts.append(first)
        if lines:
            yield [b"".join(parts), *lines[:-1]]
            parts = [lines[-1]]
    if last := b"".join(parts):
        yield [last]
