"""Shards that are being written: ids, masks and starts of documents, with the digests that the manifest names."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stack.core import files
from stack.data.encoding import Encoded, id_dtype
from stack.data.packed import SPLITS
from stack.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Item:
    """What is decided about one document, or (row None) only what was refused after the last one."""

    refused: dict[str, int]  # rows refused since the item before, by reason
    row: int | None = None
    digest: bytes = b""
    num_bytes: int = 0  # of UTF-8
    split: str = "train"
    copies: int = 0  # times it is packed; 0: not at all
    ends_row: bool = True  # nothing more comes of the row: reading may begin behind it
    passed_over: Mapping[str, int] = field(default_factory=dict)  # of a conversation's record: how often, by name


class Block:
    """The training shard and the validation shard that are being written; a shard begins with its first document."""

    def __init__(self, partial: Path, finished: list[dict[str, Any]], source: str, tokenizer: Tokenizer):
        self.text_bytes = 0  # read, packed or not
        self._partial, self._source = partial, source
        self._separator = np.array([tokenizer.end_of_text], dtype=id_dtype(tokenizer.vocab_size))
        self._number = Counter(shard["split"] for shard in finished)
        self._shards: dict[str, Shard] = {}

    @property
    def train_bytes(self) -> int:
        """Size of the training shard so far."""
        return self._shards["train"].size if "train" in self._shards else 0

    def add(self, item: Item, encoded: Encoded, copies: int) -> None:
        """Append a document so many times."""
        self.text_bytes += item.num_bytes
        for _ in range(copies):
            if item.split not in self._shards:
                name = f"{item.split}-{self._number[item.split]:05d}"
                self._shards[item.split] = Shard(self._partial, name, self._separator)
            self._shards[item.split].add(encoded, item.num_bytes, item.digest)

    def close(self, progress: dict[str, Any]) -> None:
        """Finish the shards and make them part of ``progress``, on disk: from here on they survive a kill."""
        for split in SPLITS:
            if split in self._shards:
                record, written = self._shards[split].close()
                progress["shards"].append({"split": split, "source": self._source, **record})
                progress["files"].update(written)
        files.replace(self._partial / "progress.json", json_of(progress), durable=True)


class Shard:
    """One shard that is being written."""

    def __init__(self, folder: Path, name: str, separator: np.ndarray):
        self._folder, self._name, self._separator = folder, name, separator
        self._ids = File(folder / f"{name}.bin")
        self._mask: File | None = None  # of conversations
        self._starts = array("q")
        self._text_bytes = self._texts = self._supervised = 0

    @property
    def size(self) -> int:
        """Bytes of ids."""
        return self._ids.size

    def add(self, encoded: Encoded, text_bytes: int, digest: bytes) -> None:
        """Append a document."""
        self._starts.append(self.size // self._separator.itemsize)
        self._ids.write(self._separator.tobytes() + encoded.ids.tobytes())
        if encoded.supervised is not None:
            self._mask = self._mask or File(self._folder / f"{self._name}.mask.bin")
            self._mask.write(b"\0" + encoded.supervised.tobytes())
            self._supervised += int(encoded.supervised.sum())
        self._text_bytes += text_bytes
        self._texts = (self._texts + int.from_bytes(digest)) % 2**256

    def close(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shard's entry in the manifest, and its files' entries."""
        documents = len(self._starts)
        self._starts.append(self.size // self._separator.itemsize)
        self._ids.write(self._separator.tobytes())
        targets = self._starts[-1]
        record = {
            "name": self._name,
            "documents": documents,
            "tokens": targets - documents,
            "targets": targets,
            "ids": targets + 1,
            "bytes": self._text_bytes,
            "texts": f"{self._texts:064x}",
        }
        starts = f"{self._name}.starts.npy"
        written = {
            f"{self._name}.bin": self._ids.close(),
            starts: save_array(self._folder / starts, np.array(self._starts, dtype="<i8")),
        }
        if self._mask is not None:
            self._mask.write(b"\0")
            record["supervised"] = self._supervised
            written[f"{self._name}.mask.bin"] = self._mask.close()
        return record, written


class File:
    """A file that is being written, with its size and digest."""

    def __init__(self, path: Path):
        self.size = 0
        self._file, self._hash = path.open("wb"), hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """Sync; the file's entry in the manifest."""
        self._file.flush()
        files.sync(self._file.fileno())
        self._file.close()
        return {"size": self.size, "sha256": self._hash.hexdigest()}


def count_ids(ids: np.ndarray, counts: np.ndarray, step: int = 2**24) -> None:
    """Add the occurrences of each id to ``counts``, a part at a time: bincount makes int64 of all it is given."""
    for begin in range(0, len(ids), step):
        counts += np.bincount(ids[begin : begin + step], minlength=len(counts))


def total(shards: list[dict[str, Any]], **only: str) -> dict[str, Any]:
    """Sums over the shards whose entries equal ``only``.

    ``texts`` identifies a set of texts whatever the tokenizer, the order and the shards: the sum of the SHA-256 of
    the documents modulo 2^256. Bits per byte of two runs compare where it is equal for validation.
    """
    chosen = [shard for shard in shards if all(shard[key] == value for key, value in only.items())]
    keys = [
        "documents",
        "tokens",
        "targets",
        "ids",
        "bytes",
        *(["supervised"] if any("supervised" in shard for shard in shards) else []),
    ]
    sums = {key: sum(shard[key] for shard in chosen) for key in keys}
    return {"shards": len(chosen), **sums, "texts": f"{sum(int(shard['texts'], 16) for shard in chosen) % 2**256:064x}"}


def json_of(value: Any) -> bytes:
    """JSON in the one form that digests of packed folders are taken of."""
    return files.json_bytes(value, indent=1, sort_keys=True)


def save_array(path: Path, values: np.ndarray) -> dict[str, Any]:
    """Write an .npy file; its entry in the manifest."""
    file = File(path)
    np.save(file, values, allow_pickle=False)
    return file.close()
