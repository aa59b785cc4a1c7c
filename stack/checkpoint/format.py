"""The files of a checkpoint, its manifest, and whether they hold what the manifest says.

``checkpoints/step-00001000/`` is a Hugging Face model folder (``Qwen3``, or ``Llama`` without norms on q and k) with
the state of training below ``training/``. ``manifest.json`` holds the size and the SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from safetensors import SafetensorError
from torch import Tensor

from stack.core.errors import UserError
from stack.core.files import sha256
from stack.model.huggingface import CONFIG, GENERATION, WEIGHTS, untie

FORMAT = 1
MOMENTS, STATE, MANIFEST = "training/optimizer.safetensors", "training/state.json", "manifest.json"
CHUNK = 1 << 20  # bytes that are read at once
# A file that was changed less than this before it was read may change again within one tick of the clock that stamps
# it (10 ms at most on Linux), and then its times do not tell.
SETTLED_NS = 100_000_000


@checked_dataclass(frozen=True)
class File:
    """What the manifest knows of one file."""

    size: int  # bytes
    sha256: str  # hex


@checked_dataclass(frozen=True)
class Manifest:
    """``manifest.json``: what the checkpoint is, what it was made from, and every other file in it."""

    format: Literal[1]
    step: int  # optimizer steps done
    metric: float | None  # lower is better
    native_only: bool  # no stock architecture computes this model's function
    aliases: dict[str, str]  # names that stand for a tensor stored under another name
    vocabulary_digest: str
    num_rows: int
    identity: dict[str, Any]  # the digests of what the run was made from
    files: dict[str, File]  # by path below the folder


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint in memory."""

    folder: Path
    config: dict[str, Any]  # config.json
    weights: dict[str, Tensor]  # float32 on the CPU, by parameter name; the tied table once
    moments: dict[str, Tensor]  # on the CPU, as ``exp_avg/model.norm.weight``
    state: dict[str, Any]
    manifest: Manifest


# ---------------------------------------------------------------- folders


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[Path]:
    """The checkpoint folders, good or bad, oldest step first."""
    found = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in checkpoints.glob("step-*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def step_of(folder: Path) -> int:
    """The step that a checkpoint holds; of a damaged one, the step that its name says."""
    try:
        return read_manifest(folder).step
    except UserError:
        return int(folder.name.removeprefix("step-"))


# ---------------------------------------------------------------- reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest, once every file that it names was found in its size."""
    if not folder.is_dir():
        beside = ", ".join(path.name for path in steps(folder.parent)) or "none"
        raise UserError(f"{folder}: there is no such checkpoint folder; checkpoints in {folder.parent}: {beside}")
    path = folder / MANIFEST
    try:
        manifest = TypeAdapter(Manifest).validate_json(_read(path))
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("format",) and isinstance(first["input"], int) and first["input"] > FORMAT:
            raise UserError(
                f"{path}: format {first['input']}, which a newer version of this program wrote; this one reads format "
                f"{FORMAT}: go on with the newer one"
            ) from error
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise damaged(path, f"is no whole manifest of format {FORMAT} ({where}: {first['msg']})") from error
    for name in (CONFIG, GENERATION, WEIGHTS, MOMENTS, STATE):
        if name not in manifest.files:
            raise damaged(path, f"does not name {name}, which every checkpoint has")
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise damaged(folder / name, f"cannot be read ({error.strerror}), expected {file.size:,} bytes") from error
        if size != file.size:
            raise damaged(folder / name, f"has {size:,} bytes, expected {file.size:,}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest, by size and then by digest, in constant memory; :class:`UserError`.

    What this process has verified, and nobody has touched since, is not read again.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            actual = _sha256(folder / name)
        except OSError as error:
            raise damaged(folder / name, f"cannot be read ({error.strerror})") from error
        _compare(folder / name, file, actual)
    return manifest


def load(folder: Path) -> Loaded:
    """Read a checkpoint, each file once, and verify every digest; :class:`UserError` names what does not hold."""
    manifest = read_manifest(folder)

    def read(name: str, parse: Callable[[bytes], Any]) -> Any:
        data = _read(folder / name)
        _compare(folder / name, manifest.files[name], hashlib.sha256(data).hexdigest())
        try:
            return parse(data)
        except (ValueError, SafetensorError) as error:
            raise damaged(folder / name, f"cannot be understood ({error})") from error

    parts = {CONFIG: json.loads, WEIGHTS: safetensors.torch.load, MOMENTS: safetensors.torch.load, STATE: json.loads}
    found = {name: read(name, parts.get(name, len)) for name in manifest.files}
    weights = untie(found[CONFIG], found[WEIGHTS], folder)
    return Loaded(folder, found[CONFIG], weights, found[MOMENTS], found[STATE], manifest)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error


def _compare(path: Path, file: File, actual: str) -> None:
    if actual != file.sha256:
        raise damaged(path, f"has SHA-256 {actual}, expected {file.sha256}")


def damaged(path: Path, what: str) -> UserError:
    """The error of a file that does not hold what it should."""
    return UserError(
        f"{path}: {what}; the checkpoint was cut or changed after it was written, "
        "so take another one or copy it again from where it came"
    )


# ---------------------------------------------------------------- digests

_known: dict[tuple[int, ...], str] = {}  # SHA-256 of files that this process has read, by what differs after a change


def _sha256(path: Path) -> str:
    state, now = _state(path), time.time_ns()
    return _known.get(state) or _remember(state, now, sha256(path))


def read_back(path: Path, written: Iterable[np.ndarray]) -> File:
    """Read a new file once and compare it with what was written (parts in order, uint8); its entry in the manifest."""
    state, now = _state(path), time.time_ns()
    hashed, same = hashlib.sha256(), True
    with path.open("rb") as file:
        for part in written:
            for begin in range(0, len(part), CHUNK):
                wanted = part[begin : begin + CHUNK]
                chunk = file.read(len(wanted))
                hashed.update(chunk)
                same = same and np.array_equal(np.frombuffer(chunk, np.uint8), wanted)
        if not same or file.read(1):
            raise damaged(path, "does not read back as it was written")
    return File(state[2], _remember(state, now, hashed.hexdigest()))


def _state(path: Path) -> tuple[int, ...]:
    """What differs after a change: device, inode, size, time of change of the content, and of anything."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _remember(state: tuple[int, ...], now: int, digest: str) -> str:
    """Keep the digest of a file that was in ``state`` ``now``, before it was read."""
    if max(state[-2:]) + SETTLED_NS < now:
        _known[state] = digest
    return digest
