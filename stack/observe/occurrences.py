"""How often each id stands in the data that a model was trained on, and about how often training has met it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack.checkpoint import MANIFEST, STATE, Manifest, read_manifest
from stack.core.errors import UserError
from stack.core.files import read_json
from stack.data.packed import Packed, open_packed
from stack.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Occurrences:
    """Of every row of a table."""

    folders: list[str]  # the packed data
    counts: np.ndarray  # int64 [rows], of their training splits
    met: np.ndarray | None  # float64 [rows]: the counts times the epochs; None where these are not known


def in_folder(folder: Path, tokenizer: Tokenizer, rows: int) -> Occurrences:
    """In a packed folder; UserError where its ids are those of another vocabulary."""
    return Occurrences([str(folder)], _filled(open_packed(folder, tokenizer), rows), None)


def in_history(folder: Path, manifest: Manifest, rows: int, show: Callable[[str], Any]) -> Occurrences | None:
    """In all the data that a checkpoint was trained on: its own, its base's, and so on, each counted once.

    None unless all of it is there, as a part would not do: a row that never occurs in the conversations may have been
    trained by the base's text. ``show`` hears what is missing. Replayed text is not counted a second time.
    """
    counts, met = np.zeros(rows, dtype=np.int64), np.zeros(rows)
    found: dict[str, Packed] = {}
    here: tuple[Path, Manifest] | None = (folder, manifest)
    try:
        while here is not None:
            packed, before = _packed_of(*here), _parent_of(*here)
            goes_on = before is not None and here[1].identity.get("branch") is not None  # so does its count of tokens
            trained_on = _tokens(here[0]) - (_tokens(before[0]) if goes_on else 0)
            own = _filled(packed, rows)
            if packed.digest not in found:
                counts += own
                found[packed.digest] = packed
            met += own * (trained_on / packed.split("train").num_targets)
            here = before
    except UserError as error:
        show(f"occurrences are not known: {error}")
        return None
    return Occurrences([str(packed.folder) for packed in found.values()], counts, met)


def _filled(packed: Packed, rows: int) -> np.ndarray:
    """Ids are only ever added, so rows that the data do not know have no occurrence in it."""
    return np.pad(packed.counts(), (0, rows - packed.num_rows))


def _packed_of(folder: Path, manifest: Manifest) -> Packed:
    named, digest = manifest.identity.get("packed_folder"), manifest.identity.get("packed")
    if named is None:
        raise UserError(f"{folder} names no packed data")
    packed = open_packed(_beside(folder, named))
    if packed.digest != digest:
        raise UserError(f"{packed.folder} has the digest {packed.digest}, {folder} was trained on {digest}")
    return packed


def _parent_of(folder: Path, manifest: Manifest) -> tuple[Path, Manifest] | None:
    """The checkpoint that the weights come from: of a branch, or the base of a fine-tuning."""
    named = manifest.identity.get("branch") or manifest.identity.get("base")
    if named is None:
        return None
    parent = _beside(folder, named)
    if not (parent / MANIFEST).is_file():
        raise UserError(f"{named}, which {folder} began from, is no checkpoint of this program that is here")
    found, expected = read_manifest(parent), manifest.identity.get("base_vocabulary", manifest.vocabulary_digest)
    if found.vocabulary_digest != expected:
        raise UserError(f"{parent} has the vocabulary {found.vocabulary_digest}, {folder} began from {expected}")
    return parent, found


def _beside(folder: Path, named: str) -> Path:
    """A path that a manifest names: as it is, or below one of the folders that the checkpoint is in."""
    places = [Path(named), *(parent / named for parent in folder.resolve().parents)]
    return next((place for place in places if place.exists()), places[0])


def _tokens(folder: Path) -> int:
    """Targets that were trained on up to a checkpoint."""
    return int(read_json(folder / STATE)["tokens"])
