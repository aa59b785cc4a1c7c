"""What a run that goes on learns from: the packed data that its checkpoint names, found wherever they lie now.

Neither the text nor the conversations that they were made of are read, so these may be gone, moved or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stack.checkpoint import MANIFEST
from stack.config.schema import Config
from stack.core.errors import UserError
from stack.core.files import sha256
from stack.training.run_folder import ResumePoint, same_sources


def find_packed(named: str, digest: str | None, checkpoint: Path, root: Path) -> Path | None:
    """The packed folder of a digest: where ``named`` says, below ``root``, or beside the checkpoint; None if gone.

    Args:
        named: the folder as a checkpoint names it, perhaps relative to the folder in which that run was started.
        digest: SHA-256 of its manifest.
        checkpoint: whose data they are.
        root: ``data_dir``.
    """
    above = () if Path(named).is_absolute() else checkpoint.resolve().parents
    places = [Path(named), root / "packed" / Path(named).name, *(parent / named for parent in above)]
    places += sorted((root / "packed").glob("*"))  # it may have been renamed
    return next((place for place in places if digest is not None and _digest(place) == digest), None)


def _digest(folder: Path) -> str | None:
    try:
        return sha256(folder / MANIFEST)
    except OSError:
        return None


def packed_of(start: ResumePoint, root: Path, pack: Callable[[], Path], show: Callable[[str], None]) -> Path:
    """The packed data that the checkpoint of ``start`` was trained on; where they are gone, what ``pack`` makes.

    The caller holds what comes back against the digest.

    Raises:
        UserError: they are gone, and so is what they were made of.
    """
    checkpoint, named = Path(str(start.checkpoint)), str(start.packed_folder)
    found = find_packed(named, start.packed, checkpoint, root)
    if found is not None:
        show(f"packed data: {found}, which {checkpoint} was trained on; the text is not read again")
        return found
    show(f"the packed data that {checkpoint} was trained on are gone ({named}); they are made again")
    try:
        return pack()
    except UserError as error:
        raise UserError(
            f"{checkpoint} was trained on the packed data {named} (digest {start.packed}), which are neither there nor "
            f"in {root / 'packed'}, and cannot be made again: {error}; bring back one of the two"
        ) from error


def packed_of_parent(start: ResumePoint, config: Config, root: Path) -> Path | None:
    """The packed data that a branch's parent was trained on, where the branch asks for the same; None if gone."""
    parent = Path(str(start.checkpoint))
    if start.packed_folder is None or not same_sources(parent.resolve().parent.parent, config):
        return None
    return find_packed(start.packed_folder, start.packed, parent, root)
