"""Packed data: shards of ids on disk, opened, checked, and read as one stream a split."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stack.core.errors import UserError
from stack.data.encoding import id_dtype
from stack.text.tokenizer import Tokenizer

FORMAT = 1
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Split:
    """One split of a packed folder as one stream: its shards' ids, one after another."""

    name: str
    lengths: np.ndarray  # int64 [num_documents]: inputs of each document, 1 + its tokens
    starts: np.ndarray  # int64 [num_documents]: where its <|endoftext|> stands in the stream
    num_bytes: int  # UTF-8 bytes of the text, a document packed twice counted twice
    _shards: tuple[np.ndarray, ...]  # uint16 or uint32, mapped from the files
    _offsets: np.ndarray  # int64: where each shard begins in the stream
    _masks: tuple[np.ndarray, ...] = ()  # of conversations: uint8 for each id
    num_supervised: int | None = None  # of conversations
    sources: tuple[str, ...] = ("text",)
    _source_of_shard: tuple[int, ...] = ()  # which of them each shard is of; nothing: all of the first

    @property
    def num_documents(self) -> int:
        """Documents, a repeated one counted each time."""
        return len(self.lengths)

    @property
    def num_targets(self) -> int:
        """Targets of one epoch; of conversations the supervised ones."""
        return int(self.lengths.sum()) if self.num_supervised is None else self.num_supervised

    @cached_property
    def source_of(self) -> np.ndarray:
        """Which of ``sources`` each document is of, int64 [num_documents]."""
        shard = np.searchsorted(self._offsets, self.starts, side="right") - 1
        return np.asarray(self._source_of_shard or [0] * len(self._shards), dtype=np.int64)[shard]

    def ids(self, start: int, count: int) -> np.ndarray:
        """The ids at ``start`` to ``start + count`` of the stream, uint16 or uint32 [count], all within one shard."""
        return self._part(self._shards, start, count)

    def supervised(self, start: int, count: int) -> np.ndarray | None:
        """For each of those ids 1 where it is supervised, uint8 [count]; None where every id is."""
        return self._part(self._masks, start, count) if self._masks else None

    def _part(self, arrays: tuple[np.ndarray, ...], start: int, count: int) -> np.ndarray:
        shard = int(np.searchsorted(self._offsets, start, side="right")) - 1
        begin = start - int(self._offsets[shard])
        found = arrays[shard][begin : begin + count]
        assert len(found) == count, f"{self.name}: {count} ids from {start} on cross the end of a shard"
        return found


@dataclass(frozen=True)
class Packed:
    """A finished packed folder, opened and checked."""

    folder: Path
    manifest: dict[str, Any]
    digest: str  # SHA-256 of the manifest, which holds the digest of every file

    @property
    def vocabulary_digest(self) -> str:
        """The vocabulary that its ids mean."""
        return self.manifest["vocabulary"]

    @property
    def num_rows(self) -> int:
        """Rows of the table that its ids address."""
        return self.manifest["num_rows"]

    @cached_property
    def _splits(self) -> dict[str, Split]:
        return {name: self._open(name) for name in SPLITS}

    def split(self, name: str) -> Split:
        """``train`` or ``validation``."""
        return self._splits[name]

    def counts(self) -> np.ndarray:
        """How often each id occurs in the training split, int64 [num_rows]."""
        return np.load(self.folder / "counts.npy", allow_pickle=False)

    def _open(self, name: str) -> Split:
        shards, masks, lengths, starts, offset = [], [], [], [], 0
        offsets, sources = [], []
        names = tuple(self.manifest["sources"])
        for shard in (shard for shard in self.manifest["shards"] if shard["split"] == name):
            ids = np.memmap(self.folder / f"{shard['name']}.bin", dtype=id_dtype(self.num_rows), mode="r")
            edges = np.load(self.folder / f"{shard['name']}.starts.npy", allow_pickle=False)
            shards.append(ids.view(np.ndarray))
            if "supervised" in shard:
                mask = np.memmap(self.folder / f"{shard['name']}.mask.bin", dtype=np.uint8, mode="r")
                masks.append(mask.view(np.ndarray))
            sources.append(names.index(shard["source"]))
            lengths.append(np.diff(edges))
            starts.append(edges[:-1] + offset)
            offsets.append(offset)
            offset += len(ids)
        none = np.zeros(0, dtype=np.int64)
        return Split(
            name=name,
            lengths=np.concatenate([none, *lengths]),
            starts=np.concatenate([none, *starts]),
            num_bytes=self.manifest["splits"][name]["bytes"],
            _shards=tuple(shards),
            _offsets=np.array(offsets, dtype=np.int64),
            _masks=tuple(masks),
            num_supervised=self.manifest["splits"][name].get("supervised"),
            sources=names,
            _source_of_shard=tuple(sources),
        )


def open_packed(folder: Path, tokenizer: Tokenizer | None = None) -> Packed:
    """Open a packed folder after holding every file's size against the manifest; UserError where one differs.

    UserError too where its ids are not those of ``tokenizer``.
    """
    path = folder / "manifest.json"
    way_out = f"delete {folder} to have it packed again"
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a finished packed folder: {path.name} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {way_out}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise UserError(f"{path}: format {found}, but this program reads format {FORMAT}; {way_out}")
    dtype = id_dtype(manifest["num_rows"])
    if manifest["dtype"] != dtype.name:
        raise UserError(
            f"{path}: ids as {manifest['dtype']}, but {manifest['num_rows']} rows need {dtype.name}; {way_out}"
        )
    for name, expected in manifest["files"].items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected["size"]:
            have = "is missing" if actual is None else f"has {actual} bytes"
            raise UserError(f"{file} {have}, {expected['size']} bytes are expected; {way_out}")
    packed = Packed(folder, manifest, hashlib.sha256(text).hexdigest())
    counts, expected = packed.counts(), manifest["splits"]["train"]["ids"]
    if (len(counts), int(counts.sum())) != (packed.num_rows, expected):
        raise UserError(
            f"{folder / 'counts.npy'} counts {int(counts.sum())} ids of {len(counts)} rows, "
            f"the manifest {expected} of {packed.num_rows}; {way_out}"
        )
    if tokenizer is not None and tokenizer.digest != packed.vocabulary_digest:
        raise UserError(
            f"the packed data {folder} were made with another vocabulary: {packed.num_rows} rows, digest "
            f"{packed.vocabulary_digest}; the tokenizer {tokenizer.folder} has {tokenizer.vocab_size}, digest "
            f"{tokenizer.digest}; set data.packed=null (chat.packed=null) to pack anew, or take the "
            "tokenizer that made them (tokenizer.folder=FOLDER; of conversations, the base=)"
        )
    return packed
