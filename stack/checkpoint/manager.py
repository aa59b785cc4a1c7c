"""Saving and keeping checkpoints: a folder is whole or not there.

A checkpoint is written beside as ``.step-00001000.partial``, synced, read back and renamed; its manifest comes last. A
folder of the same step is moved to ``.step-00001000.old`` for the moment between the two renames. :func:`tidy` mends
what a kill left of either.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stack.checkpoint.format import (
    FORMAT,
    MANIFEST,
    MOMENTS,
    STATE,
    Manifest,
    damaged,
    folder_of,
    read_back,
    read_manifest,
    steps,
    verify,
)
from stack.checkpoint.tensors import bytes_of
from stack.config import schema as config
from stack.core import files as disk
from stack.core.errors import UserError
from stack.model.embedding import ALIASES, row_parameters_of
from stack.model.huggingface import CONFIG, GENERATION, WEIGHTS, generation_settings, model_settings
from stack.model.names import by_name
from stack.text.tokenizer import Tokenizer

Written = dict[str, list[np.ndarray]]  # the bytes of every file in order, uint8; tensors are views, not copies


def save(
    checkpoints: Path,
    step: int,
    *,
    model_config: config.Model,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict[str, Any],
    identity: dict[str, Any],
    metric: float | None,
) -> Path:
    """Write ``checkpoints/step-XXXXXXXX`` whole, or leave everything as it was and raise :class:`UserError`.

    Only one process may save into ``checkpoints``. A folder of the same step is replaced. ``state`` and ``identity``
    are JSON values without NaN; a ``metric`` that is not finite counts as none.
    """
    final = folder_of(checkpoints, step)
    partial = disk.partial(final)
    weights = _one_copy(_plain(weights, torch.float32))
    moments = _plain(moments, None)
    for rows in row_parameters_of(weights):
        assert len(rows.tensor) == tokenizer.vocab_size, "a row without a token, or a token without a row"
    documents = {
        CONFIG: model_settings(model_config, tokenizer),
        GENERATION: generation_settings(tokenizer),
        STATE: state,
    }
    facts = {
        "format": FORMAT,
        "step": step,
        "metric": metric if metric is not None and math.isfinite(metric) else None,
        "native_only": model_config.native_only,
        "aliases": ALIASES,
        "vocabulary_digest": tokenizer.digest,
        "num_rows": tokenizer.vocab_size,
        "identity": identity,
    }
    tidy(checkpoints)
    try:
        written = _fill(partial, documents, {WEIGHTS: weights, MOMENTS: moments})
        tokenizer.save_into(partial, max_length=model_config.context)
        _seal(partial, written, facts)
        if final.exists():
            final.rename(_aside(final))
        partial.rename(final)
        disk.sync_path(checkpoints)
    except (OSError, SafetensorError, UserError) as error:
        needed = sum(tensor.nbytes for tensor in [*weights.values(), *moments.values()])
        raise UserError(_not_saved(final, error, needed)) from error
    finally:
        tidy(checkpoints)
    return final


def _plain(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, under their own names."""
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in by_name(tensors).items()}


def _one_copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without a second name for the table; safetensors refuses to store one memory twice."""
    for alias, name in ALIASES.items():
        assert alias not in weights or torch.equal(weights[alias], weights[name]), "the head is not the table"
    return {name: tensor for name, tensor in weights.items() if name not in ALIASES}


def _fill(partial: Path, documents: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> Written:
    """Write the folder's own files."""
    (partial / "training").mkdir(parents=True)
    written: Written = {}
    for name, value in documents.items():
        written[name] = [_write(partial / name, value)]
    for name, named in tensors.items():
        written[name] = _write_tensors(partial / name, named)
        shutil.copymode(partial / CONFIG, partial / name)  # the library lets nobody else read its files
    return written


def _write(path: Path, value: Any) -> np.ndarray:
    """Write JSON; its bytes."""
    data = disk.json_bytes(value)
    path.write_bytes(data)
    return np.frombuffer(data, np.uint8)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> list[np.ndarray]:
    """Write a safetensors file; its bytes: the header, and the tensors in their order in the file."""
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with safe_open(path, "pt") as file:  # maps the file: no tensor is read
        stored = {name: _kind(file.get_tensor(name)) for name in file.offset_keys()}
    if stored != {name: _kind(tensor) for name, tensor in tensors.items()}:
        raise damaged(path, "does not read back as it was written")
    parts = [bytes_of(tensors[name]) for name in stored]
    with path.open("rb") as file:
        header = file.read(path.stat().st_size - sum(map(len, parts)))
    return [np.frombuffer(header, np.uint8), *parts]


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _seal(partial: Path, written: Written, facts: dict[str, Any]) -> None:
    """Flush the folder to the disk, compare it with what was written, and add the manifest in the same way."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    names = [path.relative_to(partial).as_posix() for path in paths]
    written |= {name: [np.fromfile(partial / name, np.uint8)] for name in names if name not in written}
    for path in [*partial.rglob("*"), partial]:
        disk.sync_path(path)
    files = {name: asdict(read_back(partial / name, written[name])) for name in names}
    manifest = _write(partial / MANIFEST, {**facts, "files": files})
    for path in (partial / MANIFEST, partial):
        disk.sync_path(path)
    read_back(partial / MANIFEST, [manifest])


def _not_saved(final: Path, error: Exception, needed: int) -> str:
    """The message: what stopped a save, how much room it needs, and the last good checkpoint."""
    cause = getattr(error, "strerror", None) or str(error)
    last = newest(final.parent, warn=lambda line: None)  # clears the partial folder: its bytes count as free
    home = next(folder for folder in final.absolute().parents if folder.exists())
    return (
        f"{final}: the checkpoint could not be saved: {cause}. It needs {needed:,} bytes; "
        f"{shutil.disk_usage(home).free:,} are free in {home}. "
        + (f"The last good checkpoint is {last}. " if last else "There is no earlier good checkpoint. ")
        + "Make room or remove the cause, then start the same command again."
    )


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def tidy(checkpoints: Path) -> None:
    """Clear what a killed save or removal left; for the one process that may write here.

    A folder that was set aside goes back to its name if the save that was to replace it did not get there.
    """
    for partial in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for old in checkpoints.glob(".step-*.old"):
        final = checkpoints / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            _remove(old)
        else:
            old.rename(final)


def _remove(folder: Path) -> None:
    """Remove a folder so that a kill in the midst of it leaves no half checkpoint under a good name."""
    doomed = folder.rename(disk.partial(folder))
    shutil.rmtree(doomed, ignore_errors=True)


def retain(checkpoints: Path, keep: int) -> None:
    """Keep the newest ``keep`` good checkpoints and the best by metric; remove the older good ones.

    Those that stay as the newest are verified first. Damaged folders are left alone: they were warned of by name,
    and what is still in them is not ours to throw away.
    """
    assert keep >= 1
    manifests: dict[Path, Manifest] = {}
    newest_good: list[Path] = []
    for folder in reversed(steps(checkpoints)):
        try:
            manifests[folder] = verify(folder) if len(newest_good) < keep else read_manifest(folder)
        except UserError:
            continue
        if len(newest_good) < keep:
            newest_good.append(folder)
    scored = [(manifest.metric, folder) for folder, manifest in manifests.items() if manifest.metric is not None]
    best = min(scored, key=lambda pair: pair[0], default=(None, None))[1]
    for folder in manifests.keys() - {*newest_good, best}:
        _remove(folder)


def newest(checkpoints: Path, warn: Callable[[str], None], *, owner: bool = True) -> Path | None:
    """The newest checkpoint whose every digest holds; ``warn`` hears of each newer one that is damaged, by name.

    ``owner``: the caller is the one process that may write here, so what a kill left is cleared first.
    """
    if owner:
        tidy(checkpoints)
    for folder in reversed(steps(checkpoints)):
        try:
            verify(folder)
        except UserError as error:
            warn(f"the checkpoint {folder.name} is damaged and passed over: {error}")
        else:
            return folder
    return None
