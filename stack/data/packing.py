"""Packing: sources of text become shards of ids on disk.

A shard is the documents of one source, each ``<|endoftext|>`` then its tokens, and one closing ``<|endoftext|>``: n + 1
inputs for a document of n tokens, and as many targets, the last of them the next ``<|endoftext|>``. Conversations are
documents like any other; a mask beside their ids says which of these are supervised.

Work goes in blocks, one training shard and its validation shard; what a killed process finished is kept, and the folder
that comes of it is equal byte for byte to one made in one go, by any number of workers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stack.config import schema as config
from stack.core import files, locks
from stack.core.errors import UserError
from stack.data import sources as corpus
from stack.data.encoding import Content, Encode, encoder, id_dtype
from stack.data.files import Changed
from stack.data.holding_out import Rule, rule_of
from stack.data.packed import FORMAT, SPLITS, Packed, open_packed
from stack.data.packing_report import MB, Meter, every_row_is_bad, example, refuse_no_text, summary
from stack.data.shards import Block, Item, count_ids, json_of, save_array, total
from stack.data.sources import Known
from stack.text import template
from stack.text.tokenizer import Tokenizer

_LOOK_SECONDS = 0.1  # between two looks whether a lock is free


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
    known = {name: corpus.snapshot(source) for name, source in data.resolved_sources().items()}
    inputs = {
        "format": FORMAT,
        "vocabulary": tokenizer.digest,
        "sources": {name: source.fingerprint for name, source in known.items()},
        **{key: getattr(data, key) for key in ("validation", "seed", "on_bad_row", "shard_mb")},
    }
    if isinstance(data, config.Conversations):
        digest = hashlib.sha256(template.TEMPLATE.encode()).hexdigest()
        inputs |= {"window": window, "too_long": data.too_long, "template": digest}
    digest = hashlib.sha256(json_of(inputs)).hexdigest()
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
    show(f"packed data: {folder} ({summary(packed, window)})")
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
    totals = {split: total(progress["shards"], split=split) for split in SPLITS}
    try:
        refuse_no_text(totals, progress["skipped"], data, unread)
    except UserError:
        shutil.rmtree(partial)  # nothing that mends it would meet in this folder again
        raise
    for line in unread:
        show(f"warning: {line}")
    show(f"counting the ids of {totals['train']['ids'] / 1e6:.1f}M tokens")
    _count(partial, progress, tokenizer.vocab_size)
    manifest = {"format": FORMAT, **made_from, **_contents(progress, totals, tokenizer, list(sources))}
    files.replace(partial / "manifest.json", json_of(manifest), durable=True)


def _count(partial: Path, progress: dict[str, Any], num_rows: int) -> None:
    """Write how often each id occurs in the training split."""
    counts = np.zeros(num_rows, dtype=np.int64)
    for shard in progress["shards"]:
        if shard["split"] == "train":
            count_ids(np.memmap(partial / f"{shard['name']}.bin", dtype=id_dtype(num_rows), mode="r"), counts)
    progress["files"]["counts.npy"] = save_array(partial / "counts.npy", counts)


def _contents(
    progress: dict[str, Any], totals: dict[str, Any], tokenizer: Tokenizer, names: list[str]
) -> dict[str, Any]:
    """What the manifest says of the folder's contents."""
    shards = progress["shards"]

    def of_source(name: str) -> dict[str, Any]:
        sums = {split: total(shards, split=split, source=name) for split in SPLITS}
        return {**sums, "skipped": progress["skipped"][name]}

    return {
        "vocabulary": tokenizer.digest,
        "num_rows": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": id_dtype(tokenizer.vocab_size).name,
        "splits": totals,
        "sources": {name: of_source(name) for name in names},
        "validation_digest": totals["validation"]["texts"],
        "shards": shards,
        "files": progress["files"],
    }


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
    meter = Meter(name, source, progress["read_bytes"].get(name, 0), show)
    limit = data.shard_mb * MB
    start, first, good = progress["next_row"].get(name, 0), {}, False

    def begin(document: corpus.Document) -> None:
        if talk and start == 0 and (data.files or data.hub.path):  # one's own; `sft.show` shows any
            show(example(document, name, tokenizer))

    items = _items(name, source, known, rule, start, first, begin)
    block = Block(partial, progress["shards"], name, tokenizer)
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
            block = Block(partial, progress["shards"], name, tokenizer)
    progress["next_row"][name], progress["read_bytes"][name] = "end", meter.read
    block.close(progress)
    meter.line(done=True)
    if not good and start == 0 and first:
        unread.append(every_row_is_bad(name, source, skipped["bad_rows"], first))


def _items(
    name: str,
    source: config.Source,
    known: Known,
    rule: Rule,
    start: int,
    first: dict[str, str],
    begin: Callable[[corpus.Document], None],
) -> Iterator[tuple[Item, Content]]:
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
            item = Item(refused(), part.row, part.digest, part.num_bytes, split, copies, ends, passed_over)
            yield item, part.content if copies else None
    yield Item(refused()), None
