"""The tokenizer of a corpus: trained on a sample of its training documents, in a folder that is named by its inputs."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack.config import schema as config
from stack.core.errors import UserError
from stack.core.files import create_folder, read_json, short_digest, write_json
from stack.data.holding_out import rule_of
from stack.data.sources import Known, documents, snapshot, uniform
from stack.text import tokenizer
from stack.text.bpe import PATTERN, fit, hugging_face_settings
from stack.text.portions import portions
from stack.text.tokenizer import MULTIPLE, Tokenizer

FORMAT = 1  # raise it when the same text and settings are to give another tokenizer
READ = 4  # the sample is drawn from the first READ * sample_mb of each source, since a hub set may have no end
MEASURED_MB = 1.0  # held-out text of each source on which bytes per token are measured


def train_tokenizer(settings: config.Tokenizer, data: config.Data, root: Path, show: Callable[[str], Any]) -> Tokenizer:
    """The tokenizer of these settings: ``settings.folder``, a finished folder of equal inputs, or a new one.

    A new one is trained on a sample of training documents and stands in ``root/tokenizers/NAME-<8 hex>``, whole or not
    at all. UserError for sources without text, and where a file changes meanwhile.
    """
    if settings.folder is not None:
        return _padded(tokenizer.load(settings.folder))
    known = {name: snapshot(source) for name, source in data.resolved_sources().items()}
    inputs = _inputs(settings, data, known)
    folder = _folder(root, settings, inputs)
    if data.validation and _saw_all(folder):
        inputs["held_out"] = "last part"
        folder = _folder(root, settings, inputs)
    if (folder / "manifest.json").is_file():
        found = tokenizer.load(folder)
        show(f"tokenizer {folder.name}: {found.vocab_size:,} entries, already trained")
        return found
    create_folder(folder, lambda beside: _make(beside, settings, data, known, inputs, show))
    return tokenizer.load(folder)


def _folder(root: Path, settings: config.Tokenizer, inputs: dict[str, Any]) -> Path:
    return root / "tokenizers" / f"{settings.name}-{short_digest(inputs)}"


def _saw_all(folder: Path) -> bool:
    """Whether an earlier version trained the tokenizer on all of a text that is too short for the hash.

    Such a text could not be packed then; now its last part is held out, also from the tokenizer.
    """
    path = folder / "manifest.json"
    manifest = read_json(path) if path.is_file() else {"held_out": None}
    return "held_out" not in manifest and not manifest.get("bytes_per_token")


def _padded(found: Tokenizer) -> Tokenizer:
    """The same, if a table can be made for it; UserError for a tokenizer that was made for another one."""
    if found.vocab_size % MULTIPLE or found.unknown:
        what = f"no token for {found.unknown.pattern!r}" if found.unknown else f"which is no multiple of {MULTIPLE}"
        raise UserError(
            f"tokenizer.folder={found.folder}: {found.vocab_size} tokens, {what}; "
            "train a tokenizer with tokenizer.folder=null, or fine-tune the model that this one belongs to"
        )
    return found


def _inputs(settings: config.Tokenizer, data: config.Data, known: dict[str, Known]) -> dict[str, Any]:
    """Everything that decides the trained tokenizer, as plain values."""
    return {
        "format": FORMAT,
        "pattern": PATTERN,
        "vocab_size": settings.vocab_size,
        "sample_mb": settings.sample_mb,
        "seed": settings.seed,
        "validation": data.validation,
        "split_seed": data.seed,
        "sources": {name: source.fingerprint for name, source in known.items()},
    }


def _make(
    folder: Path,
    settings: config.Tokenizer,
    data: config.Data,
    known: dict[str, Known],
    inputs: dict[str, Any],
    show: Callable[[str], Any],
) -> None:
    """Train, measure and write a finished folder."""
    began = time.perf_counter()
    sample, measured = _sample(settings, data, known, show)
    size = sum(len(text.encode()) for text in sample)
    inner = fit(sample, settings.vocab_size)
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", hugging_face_settings())
    made = tokenizer.load(folder)
    seconds = time.perf_counter() - began
    entries = made.vocab_size - len(made.reserved)
    show(f"tokenizer {settings.name}: {made.vocab_size:,} entries from {size / 1e6:.1f} MB of text, {seconds:.1f} s")
    if entries < settings.vocab_size:
        show(
            f"warning: tokenizer.vocab_size={settings.vocab_size:,}, but this text gives {entries:,} entries; "
            f"with {len(made.reserved)} reserved ones the vocabulary has {made.vocab_size:,} everywhere"
        )
    bytes_per_token = {name: _bytes_per_token(made, texts) for name, texts in measured.items() if any(texts)}
    for name, value in bytes_per_token.items():
        show(f"  {name:<12} {value:.2f} bytes per token")
    manifest = {
        "inputs": inputs,
        "vocabulary_digest": made.digest,
        "vocab_size": made.vocab_size,
        "reserved": len(made.reserved),
        "sample_bytes": size,
        "bytes_per_token": bytes_per_token,
        "held_out": {name: sum(len(text.encode()) for text in texts) for name, texts in measured.items()},
        "seconds": round(seconds, 1),
    }
    write_json(folder / "manifest.json", manifest)


def _sample(
    settings: config.Tokenizer, data: config.Data, known: dict[str, Known], show: Callable[[str], Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """Training texts of at most ``sample_mb``, and held-out ones of each source to measure on.

    A document is drawn with a chance in proportion to its source's weight (sequential Poisson sampling: those with the
    smallest uniform/weight are kept), so the sample is spread as the packed text is. Memory holds no more than it.
    """
    limit = settings.sample_mb * 1e6
    kept: list[tuple[float, str, int]] = []  # a heap: the worst rank first
    size = 0
    measured: dict[str, list[str]] = {}
    bad: Counter[str] = Counter()
    rule = rule_of(data)
    for name, source in data.resolved_sources().items():
        measured[name] = []
        if known[name].said:
            show(f"{name}: {known[name].said}")
        unmeasured, unread = MEASURED_MB * 1e6, READ * limit
        for document in documents(name, source, on_bad_row=data.on_bad_row, bad=bad, known=known[name]):
            for part, held_out in rule.parts(source, document):
                if held_out:
                    if unmeasured > 0:
                        measured[name].append(part.text)
                        unmeasured -= part.num_bytes
                elif source.weight > 0:
                    rank = uniform(b"tokenizer", part.key, settings.seed) / source.weight
                    heapq.heappush(kept, (-rank, part.text, part.num_bytes))
                    size += part.num_bytes
                    while size > limit and len(kept) > 1:
                        size -= heapq.heappop(kept)[2]
            unread -= document.num_bytes
            if unread <= 0:
                known[name].check()
                break
    if bad:
        show(f"rows without text: {', '.join(f'{count:,} {reason}' for reason, count in sorted(bad.items()))}")
    if size == 0:
        raise UserError(
            f"no text to train a tokenizer on: sources {list(measured)}, rows without text {dict(bad)}, "
            f"held out {sum(map(len, measured.values()))}; give other data.files or a smaller data.validation"
        )
    sample = [text for _, text, _ in sorted(kept)]
    if size > limit:  # one text, longer than the sample: as much of it, from beginning to end
        sample = ["".join(portions(text)[:: math.ceil(size / limit)]) for text in sample]
    return sample, measured


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """UTF-8 bytes of texts by the number of their tokens."""
    num_tokens = sum(map(len, tokenizer.encode_batch(texts)))
    return sum(len(text.encode()) for text in texts) / num_tokens
