"""Checkpoint folders that are whole or not there: atomic saving, verified loading, retention.

``checkpoints/step-00001000/`` is a Hugging Face model folder (``Qwen3``, or ``Llama`` without norms on q and k) with
the state of training below ``training/``. It is written beside as ``.step-00001000.partial``, synced, read back and
renamed; ``manifest.json``, the last file, holds the size and the SHA-256 of every other. A folder of the same step is
moved to ``.step-00001000.old`` for the moment between the two renames. :func:`tidy` mends what a kill left of either.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from safetensors import SafetensorError
from torch import Tensor, nn

from stack.config import schema as config
from stack.config.schema import UserError
from stack.core import files as disk
from stack.model.huggingface import CONFIG, GENERATION, HEAD, TABLE, WEIGHTS, generation_settings, model_settings, untie
from stack.text.tokenizer import Tokenizer

FORMAT = 1
MOMENTS, STATE, MANIFEST = "training/optimizer.safetensors", "training/state.json", "manifest.json"
_WRAPPERS = re.compile(r"(?<![^./])(?:_orig_mod\.|module\.)+")  # of torch.compile and of DDP, at any depth


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
    final = checkpoints / f"step-{step:08d}"
    partial = _partial(final)
    weights = _one_copy(_plain(weights, torch.float32))
    moments = _plain(moments, None)
    assert weights[TABLE].shape[0] == tokenizer.vocab_size, "a row without a token, or a token without a row"
    documents = {
        CONFIG: model_settings(model_config, tokenizer),
        GENERATION: generation_settings(tokenizer),
        STATE: state,
    }
    tensors = {WEIGHTS: weights, MOMENTS: moments}
    facts = {
        "format": FORMAT,
        "step": step,
        "metric": metric if metric is not None and math.isfinite(metric) else None,
        "native_only": model_config.native_only,
        "aliases": {HEAD: TABLE},
        "vocabulary_digest": tokenizer.digest,
        "num_rows": tokenizer.vocab_size,
        "identity": identity,
    }
    tidy(checkpoints)
    try:
        _fill(partial, documents, tensors)
        tokenizer.save_into(partial, max_length=model_config.context)
        _seal(partial, facts)
        _verify_written(partial, documents, tensors)
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
    """The tensors on the CPU, contiguous, under names without the parts that wrappers add."""
    plain = {clean_name(name): tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    assert len(plain) == len(tensors), "two names are one without their wrappers"
    return plain


def clean_name(name: str) -> str:
    """The parameter's own name: without ``_orig_mod.`` and ``module.``, wherever they stand."""
    return _WRAPPERS.sub("", name)


def _one_copy(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without a second name for the table; safetensors refuses to store one memory twice."""
    head = weights.get(HEAD)
    assert head is None or torch.equal(head, weights[TABLE]), "the head is not the table"
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


def _fill(partial: Path, documents: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> None:
    """Write the folder's own files."""
    (partial / "training").mkdir(parents=True)
    for name, value in documents.items():
        (partial / name).write_bytes(_json(value))
    for name, named in tensors.items():
        safetensors.torch.save_file(named, partial / name, {"format": "pt"})
        shutil.copymode(partial / CONFIG, partial / name)  # the library lets nobody else read its files


def _seal(partial: Path, facts: dict[str, Any]) -> None:
    """Write the manifest over every file in the folder, and bring all of it down to the disk."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {
        path.relative_to(partial).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in paths
    }
    (partial / MANIFEST).write_bytes(_json({**facts, "files": files}))
    for path in [*partial.rglob("*"), partial]:
        disk.sync_path(path)


def _verify_written(partial: Path, documents: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> None:
    """Hold the folder against what was to be written, then against its own manifest."""
    for name, value in documents.items():
        if (partial / name).read_bytes() != _json(value):
            raise _bad(partial / name, "does not read back as it was written")
    for name, named in tensors.items():
        if digest_tensors(safetensors.torch.load_file(partial / name)) != digest_tensors(named):
            raise _bad(partial / name, "does not read back as it was written")
    verify(partial)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_saved(final: Path, error: Exception, needed: int) -> str:
    """What stopped a save, what it needed, and where one stands now."""
    cause = getattr(error, "strerror", None) or str(error)
    last = newest(final.parent, warn=lambda line: None)  # clears the partial folder: its bytes count as free
    home = next(folder for folder in final.absolute().parents if folder.exists())
    return (
        f"{final}: the checkpoint could not be saved: {cause}. It needs {needed:,} bytes; "
        f"{shutil.disk_usage(home).free:,} are free in {home}. "
        + (f"The last good checkpoint is {last}. " if last else "There is no earlier good checkpoint. ")
        + "Make room or remove the cause, then start the same command again."
    )


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name.removeprefix('.')}.partial")


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
    doomed = folder.rename(_partial(folder))
    shutil.rmtree(doomed, ignore_errors=True)


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


def verify(folder: Path) -> Manifest:
    """Hold every file against the manifest, by size and then by digest, in constant memory; :class:`UserError`."""
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        try:
            actual = _sha256(folder / name)
        except OSError as error:
            raise _bad(folder / name, f"cannot be read ({error.strerror})") from error
        _compare(folder / name, file, actual)
    return manifest


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
        raise _bad(path, f"is no whole manifest of format {FORMAT} ({where}: {first['msg']})") from error
    for name in (CONFIG, GENERATION, WEIGHTS, MOMENTS, STATE):
        if name not in manifest.files:
            raise _bad(path, f"does not name {name}, which every checkpoint has")
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise _bad(folder / name, f"cannot be read ({error.strerror}), expected {file.size:,} bytes") from error
        if size != file.size:
            raise _bad(folder / name, f"has {size:,} bytes, expected {file.size:,}")
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from error


def _compare(path: Path, file: File, actual: str) -> None:
    if actual != file.sha256:
        raise _bad(path, f"has SHA-256 {actual}, expected {file.sha256}")


def _bad(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what}; the checkpoint was cut or changed after it was written, "
        "so take another one or copy it again from where it came"
    )


def load(folder: Path) -> Loaded:
    """Read a checkpoint, each file once, and verify every digest; :class:`UserError` names what does not hold."""
    manifest = read_manifest(folder)

    def read(name: str, parse: Callable[[bytes], Any]) -> Any:
        data = _read(folder / name)
        _compare(folder / name, manifest.files[name], hashlib.sha256(data).hexdigest())
        try:
            return parse(data)
        except (ValueError, SafetensorError) as error:
            raise _bad(folder / name, f"cannot be understood ({error})") from error

    parts = {CONFIG: json.loads, WEIGHTS: safetensors.torch.load, MOMENTS: safetensors.torch.load, STATE: json.loads}
    found = {name: read(name, parts.get(name, len)) for name in manifest.files}
    weights = untie(found[CONFIG], found[WEIGHTS], folder)
    return Loaded(folder, found[CONFIG], weights, found[MOMENTS], found[STATE], manifest)


@torch.no_grad()
def load_weights_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy every weight into the parameter of its name, in place, so that ties and optimizers hold.

    The model may be compiled or wrapped. Strict: all missing and unexpected names and all other shapes are listed in
    one :class:`UserError`, and then nothing is copied.
    """
    own = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    if HEAD in own and own[HEAD].data_ptr() == own[TABLE].data_ptr():
        own.pop(HEAD)
    check_fit({name: tensor.shape for name, tensor in own.items()}, weights)
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def check_fit(shapes: dict[str, torch.Size], weights: dict[str, Tensor]) -> None:
    """One :class:`UserError` with all missing and unexpected names and other shapes of a model's parameters."""
    other = [
        f"{name} is {list(weights[name].shape)} in the checkpoint and {list(shapes[name])} in the model"
        for name in sorted(shapes.keys() & weights.keys())
        if shapes[name] != weights[name].shape
    ]
    listed = {
        "missing in the checkpoint": sorted(shapes.keys() - weights.keys()),
        "unexpected in it": sorted(weights.keys() - shapes.keys()),
        "of another shape": other,
    }
    if any(listed.values()):
        lines = [f"  {len(names)} {what}: {', '.join(names)}" for what, names in listed.items() if names]
        raise UserError(
            "the weights do not fit the model:\n" + "\n".join(lines) + "\n"
            "give the model.* settings and the tokenizer that the checkpoint was trained with (see its config.json)"
        )


def digest_tensors(tensors: dict[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes, in the order of the names: equal means bit-equal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
