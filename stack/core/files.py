"""Files and folders that are whole or not there: written beside, then renamed. Digests and JSON, too."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from stack.core import locks
from stack.core.errors import UserError
from stack.core.locks import NOT_OFFERED

LOCK = "lock"  # of a folder that is being made
UNLOCKED_S = 86_400.0  # a folder without one that is older than this is made by nobody any more


def sync(handle: int) -> bool:
    """Flush an open file, or a folder's entries, to the disk; False where the file system cannot."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        return False
    return True


def sync_path(path: Path) -> bool:
    """:func:`sync` of a file or folder by its path."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return sync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_digest(inputs: dict[str, Any]) -> str:
    """The 8 hex digits by which the name of a folder tells what it was made from."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:8]


def partial(path: Path) -> Path:
    """Where a file or folder is written before it takes its name."""
    return path.with_name(f".{path.name.removeprefix('.')}.partial")


def replace(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Give a file this content, whole or not at all; text is written as UTF-8.

    ``durable``: it is on the disk before the old content goes.
    """
    beside = partial(path)
    try:
        with open(beside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                sync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def create_folder(folder: Path, make: Callable[[Path], Any]) -> None:
    """Make a folder beside, then give it its name: it stands there whole or not at all.

    Several processes may do so at once. What killed ones left beside is cleared.

    Args:
        folder: its name; one without a ``manifest.json`` is replaced.
        make: makes the folder at the path that it is given, with a ``manifest.json``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".*-*/"):
        _clear(left)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside, ExitStack() as held:
        locks.take(Path(beside) / LOCK, held)
        make(Path(beside) / "made")
        if not (folder / "manifest.json").is_file():  # nobody else was quicker
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(Path(beside) / "made", folder)


def _clear(left: Path) -> None:
    """Remove a folder that :func:`create_folder` began, if nobody is at work in it."""
    with ExitStack() as held, suppress(OSError):  # somebody else clears it, too
        locked = (left / LOCK).is_file()
        age = time.time() - left.stat().st_mtime
        if age > UNLOCKED_S if not locked else locks.take(left / LOCK, held) is None:
            shutil.rmtree(left, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}; restore or remove it") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; restore or remove it")
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all, in a form that people can read, too."""
    replace(path, json_bytes(value))


def json_bytes(value: Any, *, indent: int = 2, sort_keys: bool = False) -> bytes:
    """A JSON value as a file holds it; ValueError where it contains NaN or infinity, which JSON does not have."""
    text = json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()
