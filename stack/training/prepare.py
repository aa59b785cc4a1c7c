"""What a run learns from: tokenizer and packed data, made where they are not there yet, and split into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack.checkpoint import read_manifest
from stack.config.schema import Config, Model, Run
from stack.core.errors import UserError
from stack.core.ranks import SHARED, Ranks
from stack.data.batches import Batches, Mixed, Windows, in_order
from stack.data.packed import Packed, open_packed
from stack.data.packing import pack
from stack.data.sampling import train_tokenizer
from stack.text import tokenizer as text
from stack.text.tokenizer import Tokenizer
from stack.training import resuming
from stack.training.run_folder import FRESH, ResumePoint
from stack.vocabulary.classes import classify


@dataclass(frozen=True)
class Materials:
    """What a run is made of; the same on every rank."""

    model: Model
    tokenizer: Tokenizer
    train: Batches | Mixed
    held_out: Windows  # none where nothing is held out
    num_bytes: dict[str, int] | None  # of its text by source, for bits per byte
    classes: np.ndarray  # of every row, int64 [V]; see stack.vocabulary.classes
    identity: dict[str, Any]  # digests and folders of all this, saved with every checkpoint


def materials(
    config: Run,
    model: Model,
    tokenizer: Tokenizer,
    packed: Packed,
    identity: dict[str, Any],
    *,
    num_bytes: dict[str, int] | None = None,
    initialized: Sequence[int] = (),
    replayed: tuple[Packed, float] | None = None,
) -> Materials:
    """The batches of training and the windows of validation.

    Args:
        config: everything.
        model: the decoder's shape.
        tokenizer: of the packed data.
        packed: the data.
        identity: what a checkpoint names of its making; see :func:`identity_of`.
        num_bytes: of the held-out text by source, where bits per byte are wanted.
        initialized: rows that growth gave a new meaning.
        replayed: other packed data that are mixed in, and their share of all windows.
    """
    t = config.train
    settings = {"window": t.window, "global_batch": t.global_batch, "seed": config.seed, "pad_id": tokenizer.pad}
    train: Batches | Mixed = Batches(packed.split("train"), **settings)
    if t.epochs is not None:
        train.end = max(1, round(t.epochs * train.num_windows))
    if replayed is not None:
        other, share = replayed
        train = Mixed(train, Batches(other.split("train"), **settings), share)
    held_out = in_order(packed.split("validation"), t.window, tokenizer.pad)
    classes = classify(packed.counts(), tokenizer, initialized)
    return Materials(model, tokenizer, train, held_out, num_bytes, classes, identity)


def identity_of(config: Run, tokenizer: Tokenizer, packed: Packed, replay: Packed | None = None) -> dict[str, Any]:
    """What a checkpoint names of its making."""
    found = {"run": config.name, "vocabulary": tokenizer.digest}
    found |= {"packed": packed.digest, "packed_folder": str(packed.folder)}
    if replay is not None:
        found |= {"replay": replay.digest, "replay_folder": str(replay.folder)}
    return found


def prepare_data(
    config: Config, ranks: Ranks, show: Callable[[str], None], start: ResumePoint = FRESH
) -> tuple[Tokenizer, Packed]:
    """Tokenizer and packed data, made by rank 0 where they are not there yet, then opened by every rank."""
    folders = [Path(folder) for folder in ranks.on_main(lambda: _folders(config, start, show))]

    def opened() -> tuple[Tokenizer, Packed]:
        if start.checkpoint is not None:
            read_manifest(Path(start.checkpoint))  # is it there on every rank?
        tokenizer = text.load(folders[0])
        return tokenizer, open_packed(folders[1], tokenizer)

    return ranks.on_all(opened, SHARED)


def _folders(config: Config, start: ResumePoint, show: Callable[[str], None]) -> list[str]:
    """Those of the tokenizer and of the packed data: of a run that goes on, what its checkpoint was trained with."""
    root = Path(config.data_dir)

    def packed_with(tokenizer: Tokenizer) -> Path:
        named = config.data.packed
        return (open_packed(Path(named)) if named else pack(config.data, tokenizer, root, show)).folder

    if start.resumed:
        packed = resuming.packed_of(start, root, lambda: packed_with(text.load(str(start.checkpoint))), show)
        return [str(start.checkpoint), str(packed)]
    try:
        tokenizer = train_tokenizer(config.tokenizer, config.data, root, show)
        return [str(tokenizer.folder), str(packed_with(tokenizer))]
    except UserError as error:
        packed = resuming.packed_of_parent(start, config, root) if start.branched else None
        if packed is None:
            raise
        show(f"the branch learns from {packed}, as {start.checkpoint} did, for its own data cannot be made: {error}")
        return [str(start.checkpoint), str(packed)]
