"""Tokens out: sources of text become shards of ids on disk, and shards become one stream a split.

A shard is the documents of one source, each ``<|endoftext|>`` then its tokens, and one closing ``<|endoftext|>``: n + 1
inputs for a document of n tokens, and as many targets, the last of them the next ``<|endoftext|>``. Conversations are
documents like any other; a mask beside their ids says which of these are learnt as targets.

Work goes in blocks, one training shard and its validation shard; what a killed process finished is kept, and the folder
that comes of it is equal byte for byte to one made in one go, by any number of workers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stack.config import schema as config
from stack.config.schema import UserError
from stack.core import files as disk
from stack.core import locks
from stack.data import formats
from stack.data import sources as corpus
from stack.data.encoding import Content, Encode, Encoded, encoder, id_dtype
from stack.data.files import Changed
from stack.data.holding_out import Rule, rule_of
from stack.data.placement import plan_windows
from stack.data.sources import Known
from stack.text import conversation, template
from stack.text.tokenizer import Tokenizer

FORMAT = 1
SPLITS = ("train", "validation")
_MB = 1_000_000
_SHOW_SECONDS = 3.0
_LOOK_SECONDS = 0.1  # between two looks whether a lock is free
_ESTIMATE_AFTER = 2 * _MB  # bytes of text read; before, the speed is that of starting the workers


# ---------------------------------------------------------------------------------------------------------- reading


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
        """Targets of one epoch; of conversations those that are learnt."""
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
        """For each of those ids 1 where it is learnt as a target, uint8 [count]; None where every id is."""
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


# ---------------------------------------------------------------------------------------------------------- packing


def pack(
    data: config.Data, tokenizer: Tokenizer, root: Path, show: Callable[[str], None], *, window: int | None = None
) -> Packed:
    """Pack the sources of ``data`` into ``root/packed/NAME-<8 hex>``; reuse a finished folder, finish a begun one.

    The hex digits are of all that decides the content, so equal inputs meet in one folder. A second process that
    packs the same one waits for the first. Conversations are made to fit into ``window`` ids. UserError where there is
    nothing to learn from, and where a file is not any more what those digits say: nothing is kept then. Nothing may be
    held out.
    """
    assert (window is not None) == isinstance(data, config.Conversations), (
        "conversations, and they alone, have a window"
    )
    known = {name: corpus.look(source) for name, source in data.resolved_sources().items()}
    inputs = {
        "format": FORMAT,
        "vocabulary": tokenizer.digest,
        "sources": {name: source.fingerprint for name, source in known.items()},
        **{key: getattr(data, key) for key in ("validation", "seed", "on_bad_row", "shard_mb")},
    }
    if isinstance(data, config.Conversations):
        digest = hashlib.sha256(template.TEMPLATE.encode()).hexdigest()
        inputs |= {"window": window, "too_long": data.too_long, "template": digest}
    digest = hashlib.sha256(_json(inputs)).hexdigest()
    folder = root / "packed" / f"{data.name}-{digest[:8]}"
    if not folder.is_dir():
        with _locked(folder.with_name(f".{folder.name}.lock"), show):
            if not folder.is_dir():  # nobody finished it while this process waited
                partial = folder.with_name(f"{folder.name}.partial")
                if not (partial / "manifest.json").is_file():
                    _fill(partial, data, known, tokenizer, window or 0, {"inputs": inputs, "digest": digest}, show)
                (partial / "progress.json").unlink(missing_ok=True)
                partial.rename(folder)
    packed = open_packed(folder)
    show(f"packed data: {folder} ({_summary(packed, window)})")
    return packed


@contextmanager
def _locked(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock ``path``; it is free when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        with ExitStack() as held:
            if (other := locks.take(path, held, None if told else show)) is None:
                yield
                return
        if not told:
            show(f"another process packs this already ({other}); waiting for it ({path})")
            told = True
        time.sleep(_LOOK_SECONDS)


def _fill(
    partial: Path,
    data: config.Data,
    known: dict[str, Known],
    tokenizer: Tokenizer,
    window: int,
    made_from: dict[str, Any],
    show: Callable[[str], None],
) -> None:
    """Pack every source into ``partial``, from where its ``progress.json`` stands on; the manifest comes last."""
    progress = _resumed(partial, show)
    unread: list[str] = []  # what is wrong with sources of which every row is bad
    # By name: the digest of the inputs knows no order of sources.
    sources = {name: source for name, source in sorted(data.resolved_sources().items()) if source.weight > 0}
    cut = isinstance(data, config.Conversations) and data.too_long == "cut"
    rule = rule_of(data)
    if rule.says:
        show(rule.says)
    try:
        with encoder(tokenizer, data.workers, window, cut) as encode:
            for name, source in sources.items():
                if progress["next_row"].get(name) != "end":
                    if known[name].said:
                        show(f"{name}: {known[name].said}")
                    _pack_source(partial, progress, name, source, known[name], rule, tokenizer, encode, show, unread)
    except Changed:
        shutil.rmtree(partial)  # it would be gone on with, should the file become again what it was
        raise
    totals = {split: _total(progress["shards"], split=split) for split in SPLITS}
    try:
        _refuse_no_text(totals, progress["skipped"], data, unread)
    except UserError:
        shutil.rmtree(partial)  # nothing that mends it would meet in this folder again
        raise
    for line in unread:
        show(f"warning: {line}")
    show(f"counting the ids of {totals['train']['ids'] / 1e6:.1f}M tokens")
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for shard in progress["shards"]:
        if shard["split"] == "train":
            _count(np.memmap(partial / f"{shard['name']}.bin", dtype=id_dtype(len(counts)), mode="r"), counts)
    progress["files"]["counts.npy"] = _save_array(partial / "counts.npy", counts)
    manifest = {
        "format": FORMAT,
        **made_from,
        "vocabulary": tokenizer.digest,
        "num_rows": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": id_dtype(tokenizer.vocab_size).name,
        "splits": totals,
        "sources": {
            name: {
                **{split: _total(progress["shards"], split=split, source=name) for split in SPLITS},
                "skipped": progress["skipped"][name],
            }
            for name in sources
        },
        "validation_digest": totals["validation"]["texts"],
        "shards": progress["shards"],
        "files": progress["files"],
    }
    disk.replace(partial / "manifest.json", _json(manifest), durable=True)


def _resumed(partial: Path, show: Callable[[str], None]) -> dict[str, Any]:
    """What a killed process finished in ``partial``; a fresh start where that is nothing, or not there any more."""
    try:
        progress = json.loads((partial / "progress.json").read_bytes())
    except FileNotFoundError:
        progress = None
    if progress is not None:
        sizes = {name: file["size"] for name, file in progress["files"].items()}
        if all((partial / name).is_file() and (partial / name).stat().st_size == sizes[name] for name in sizes):
            show(f"resuming {partial} after {len(progress['shards'])} finished shards")
            return progress
        show(f"files of {partial} are damaged; packing starts over")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return {"next_row": {}, "read_bytes": {}, "skipped": {}, "shards": [], "files": {}}


def _pack_source(
    partial: Path,
    progress: dict[str, Any],
    name: str,
    source: config.Source,
    known: Known,
    rule: Rule,
    tokenizer: Tokenizer,
    encode: Encode,
    show: Callable[[str], None],
    unread: list[str],
) -> None:
    """Pack one source from its next row on, block by block; ``unread`` learns of one that has bad rows alone."""
    data = rule.data
    talk = {"cut": 0, "too_long": 0, "passed_over": {}} if isinstance(data, config.Conversations) else {}
    skipped = progress["skipped"].setdefault(name, {"empty": 0, "repeats": 0, "omissions": 0, "bad_rows": {}} | talk)
    meter = _Meter(name, source, progress["read_bytes"].get(name, 0), show)
    limit = data.shard_mb * _MB
    start, first, good = progress["next_row"].get(name, 0), {}, False

    def begin(document: corpus.Document) -> None:
        if talk and start == 0 and (data.files or data.hub.path):  # one's own; `sft.show` shows any
            show(_example(document, name, tokenizer))

    items = _items(name, source, known, rule, start, first, begin)
    block = _Block(partial, progress["shards"], name, tokenizer)
    for item, encoded in encode(items):
        for reason, count in item.refused.items():
            skipped["bad_rows"][reason] = skipped["bad_rows"].get(reason, 0) + count
        if item.row is None:
            continue
        good = True
        for key, count in item.passed_over.items():
            skipped["passed_over"][key] = skipped["passed_over"].get(key, 0) + count
        too_long = encoded.left_out > 0 and not len(encoded.ids)
        copies = 0 if too_long else item.copies
        if encoded.left_out:
            skipped["too_long" if too_long else "cut"] += 1
        skipped["empty"] += item.num_bytes == 0
        skipped["repeats"] += max(0, copies - 1)
        skipped["omissions"] += item.copies == 0 and item.num_bytes > 0
        block.add(item, encoded, copies)
        meter.add(item.num_bytes, len(encoded.ids) * copies)
        if item.ends_row and (block.text_bytes >= limit or block.train_bytes >= limit):
            progress["next_row"][name], progress["read_bytes"][name] = item.row + 1, meter.read
            known.check()  # a block that is kept holds what the files' digests name
            block.close(progress)
            block = _Block(partial, progress["shards"], name, tokenizer)
    progress["next_row"][name], progress["read_bytes"][name] = "end", meter.read
    block.close(progress)
    meter.line(done=True)
    if not good and start == 0 and first:
        unread.append(_every_row_is_bad(name, source, skipped["bad_rows"], first))


def _example(document: corpus.Document, name: str, tokenizer: Tokenizer, room: int = 600) -> str:
    """A conversation as it is learnt, in about ``room`` characters: how it begins and how it ends."""
    ids, supervised = conversation.encode(tokenizer, document.content)
    text = conversation.coloured(tokenizer, ids, supervised, marks=True).plain.rstrip("\n")
    text = text if len(text) <= room else f"{text[: room // 2]} … {text[-room // 2 :]}"
    unused = f" {_not_used(document.passed_over)}." if document.passed_over else ""
    return f"source {name}: its first conversation, with ⟦what is learnt⟧ and ‹control tokens›.{unused}\n{text}"


def _not_used(passed_over: Mapping[str, int]) -> str:
    """Which fields of conversations are not used, and how to use those that can be."""
    counts = ", ".join(f"{key} ({count:,})" for key, count in sorted(passed_over.items()))
    keep = "; chat.reasoning=keep learns reasoning" if passed_over.keys() & set(formats.REASONING) else ""
    return f"not used are {counts}{keep}"


def _every_row_is_bad(name: str, source: config.Source, bad: dict[str, int], first: dict[str, str]) -> str:
    """What is wrong with a source that has no good row, and how others look."""
    reason = max(bad, key=bad.__getitem__)
    text = f"source {name}: all {sum(bad.values()):,} rows are bad, {bad[reason]:,} of them for: {reason}"
    text += f"; the first of these is {first[reason]}"
    if not isinstance(source, config.TalkSource):
        return f"{text}; data.text=FIELD names the field that holds the text"
    if reason == formats.PREFERRED:
        return f"{text}; chat.text=chosen learns the chosen answers, where they are lists of messages"
    known = f"; known are {formats.KNOWN}; chat.text=FIELD names the field of another list of messages"
    return text + (known if " field" in reason else "")


@dataclass(frozen=True)
class _Item:
    """What is decided about one document, or (row None) only what was refused after the last one."""

    refused: dict[str, int]  # rows refused since the item before, by reason
    row: int | None = None
    digest: bytes = b""
    num_bytes: int = 0  # of UTF-8
    split: str = "train"
    copies: int = 0  # times it is packed; 0: not at all
    ends_row: bool = True  # nothing more comes of the row: reading may begin behind it
    passed_over: Mapping[str, int] = field(default_factory=dict)  # of a conversation's record: how often, by name


def _items(
    name: str,
    source: config.Source,
    known: Known,
    rule: Rule,
    start: int,
    first: dict[str, str],
    begin: Callable[[corpus.Document], None],
) -> Iterator[tuple[_Item, Content]]:
    """The documents of a source in order, from row ``start`` on, each with its content if it is packed.

    ``first`` learns where bad rows are, as :func:`stack.data.sources.documents` has it; ``begin`` gets the first
    document.
    """
    data = rule.data
    bad: Counter[str] = Counter()

    def refused() -> dict[str, int]:
        # Refusals travel with the document after them: the reader is ahead of the block that is being written.
        taken = dict(+bad)
        bad.clear()
        return taken

    found = corpus.documents(name, source, on_bad_row=data.on_bad_row, start=start, bad=bad, first=first, known=known)
    for number, document in enumerate(found):
        if number == 0:
            begin(document)
        parts = list(rule.parts(source, document))
        for place, (part, held_out) in enumerate(parts, start=1):
            if held_out:
                copies = int(rule.measured(source, part))
            else:
                copies = corpus.packs(part.digest, source.weight, data.seed)
            copies = copies if part.num_bytes else 0
            split = "validation" if held_out else "train"
            ends = place == len(parts)
            passed_over = document.passed_over if ends else {}
            item = _Item(refused(), part.row, part.digest, part.num_bytes, split, copies, ends, passed_over)
            yield item, part.content if copies else None
    yield _Item(refused()), None


# ---------------------------------------------------------------------------------------------------------- writing


class _Block:
    """The training shard and the validation shard that are being written; a shard begins with its first document."""

    def __init__(self, partial: Path, finished: list[dict[str, Any]], source: str, tokenizer: Tokenizer):
        self.text_bytes = 0  # read, packed or not
        self._partial, self._source = partial, source
        self._separator = np.array([tokenizer.end_of_text], dtype=id_dtype(tokenizer.vocab_size))
        self._number = Counter(shard["split"] for shard in finished)
        self._shards: dict[str, _Shard] = {}

    @property
    def train_bytes(self) -> int:
        """Size of the training shard so far."""
        return self._shards["train"].size if "train" in self._shards else 0

    def add(self, item: _Item, encoded: Encoded, copies: int) -> None:
        """Append a document so many times."""
        self.text_bytes += item.num_bytes
        for _ in range(copies):
            if item.split not in self._shards:
                name = f"{item.split}-{self._number[item.split]:05d}"
                self._shards[item.split] = _Shard(self._partial, name, self._separator)
            self._shards[item.split].add(encoded, item.num_bytes, item.digest)

    def close(self, progress: dict[str, Any]) -> None:
        """Finish the shards and make them part of ``progress``, on disk: from here on they survive a kill."""
        for split in SPLITS:
            if split in self._shards:
                record, files = self._shards[split].close()
                progress["shards"].append({"split": split, "source": self._source, **record})
                progress["files"].update(files)
        disk.replace(self._partial / "progress.json", _json(progress), durable=True)


class _Shard:
    """One shard that is being written."""

    def __init__(self, folder: Path, name: str, separator: np.ndarray):
        self._folder, self._name, self._separator = folder, name, separator
        self._ids = _File(folder / f"{name}.bin")
        self._mask: _File | None = None  # of conversations
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
            self._mask = self._mask or _File(self._folder / f"{self._name}.mask.bin")
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
        files = {
            f"{self._name}.bin": self._ids.close(),
            starts: _save_array(self._folder / starts, np.array(self._starts, dtype="<i8")),
        }
        if self._mask is not None:
            self._mask.write(b"\0")
            record["supervised"] = self._supervised
            files[f"{self._name}.mask.bin"] = self._mask.close()
        return record, files


class _File:
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
        disk.sync(self._file.fileno())
        self._file.close()
        return {"size": self.size, "sha256": self._hash.hexdigest()}


def _count(ids: np.ndarray, counts: np.ndarray, step: int = 2**24) -> None:
    """Add the occurrences of each id to ``counts``, a part at a time: bincount makes int64 of all it is given."""
    for begin in range(0, len(ids), step):
        counts += np.bincount(ids[begin : begin + step], minlength=len(counts))


def _total(shards: list[dict[str, Any]], **only: str) -> dict[str, Any]:
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


def _refuse_no_text(totals: dict[str, Any], skipped: dict[str, Any], data: config.Data, unread: list[str]) -> None:
    """UserError where there is nothing to learn from."""
    if totals["train"]["documents"]:
        return
    if unread:
        raise UserError("\n".join(unread))
    group = "chat" if isinstance(data, config.Conversations) else "data"
    too_long = any(counts.get("too_long") for counts in skipped.values())
    wider = "; a larger train.window takes in what is too long" if too_long else ""
    sources = "; ".join(
        f"{name} ({', '.join(source.files) if source.hub is None else source.hub.path}), "
        f"not packed: {json.dumps(skipped.get(name, 'weight 0'))}"
        for name, source in data.resolved_sources().items()
    )
    raise UserError(
        f"the train split has 0 documents, at least 1 is needed (train has {totals['train']['documents']}, "
        f"validation {totals['validation']['documents']}); sources: {sources}; "
        f"lower {group}.validation={data.validation} or give more text{wider}"
    )


class _Meter:
    """Counts what was read of a source, and shows it now and then."""

    def __init__(self, name: str, source: config.Source, read: int, show: Callable[[str], None]):
        self.read = read  # bytes of text
        self._name, self._show, self._tokens = name, show, 0
        self._total = corpus.expected_bytes(source)
        self._begin, self._before = time.monotonic(), read
        self._next = self._begin + _SHOW_SECONDS

    def add(self, num_bytes: int, tokens: int) -> None:
        """Count one document."""
        self.read += num_bytes
        self._tokens += tokens
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SHOW_SECONDS
            self.line()

    def line(self, *, done: bool = False) -> None:
        """Show where the source stands."""
        read = self.read - self._before
        speed = read / max(time.monotonic() - self._begin, 1e-9)
        left = ""
        if not done and self._total and self.read < self._total and read >= _ESTIMATE_AFTER:
            left = f", {self.read / self._total:.0%}, about {(self._total - self.read) / speed / 60:.1f} min left"
        tokens = f"{self._tokens / 1e6:.1f}M tokens"
        self._show(f"packing {self._name}: {self.read / _MB:.1f} MB, {speed / _MB:.1f} MB/s, {tokens}{left}")


def _summary(packed: Packed, window: int | None) -> str:
    """What is in a packed folder, in a few words; of conversations also what did not get in."""
    parts = []
    for split, total in packed.manifest["splits"].items():
        talk = f", {total['supervised'] / 1e6:.2f}M of them learnt" if window else ""
        tokens = f"{total['tokens'] / 1e6:.2f}M tokens{talk}"
        what = "conversations" if window else "documents"
        parts.append(f"{split}: {total['documents']} {what}, {tokens}, {total['bytes'] / _MB:.1f} MB")
    if window:
        share = plan_windows(packed.split("train").lengths, window, seed=0).padding_share(window)
        skipped = [source["skipped"] for source in packed.manifest["sources"].values()]
        cut, too_long = (sum(counts[key] for counts in skipped) for key in ("cut", "too_long"))
        bad = sum(sum(counts["bad_rows"].values()) for counts in skipped)
        parts.append(f"{share:.1%} padding at window {window}; {cut} cut, {too_long} too long, {bad} bad rows")
        reasons = sum((Counter(counts["bad_rows"]) for counts in skipped), Counter())
        passed_over = sum((Counter(counts.get("passed_over", {})) for counts in skipped), Counter())
        parts += [_not_used(passed_over)] if passed_over else []
        parts += [", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())] if bad else []
    return "; ".join(parts)


def _json(value: Any) -> bytes:
    """JSON in the form whose digests name packed folders and tell them apart."""
    return disk.json_bytes(value, indent=1, sort_keys=True)


def _save_array(path: Path, values: np.ndarray) -> dict[str, Any]:
    """Write an .npy file; its entry in the manifest."""
    file = _File(path)
    np.save(file, values, allow_pickle=False)
    return file.close()
