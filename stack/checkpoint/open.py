"""A base to start from: a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama.

Everything that the decoder of this program does not compute is refused by name. A folder that only looks right would
train well and be another model than the one its files describe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stack.checkpoint import manager as checkpoint
from stack.checkpoint.manager import MANIFEST
from stack.config import schema as config
from stack.config.schema import UserError
from stack.core.files import read_json
from stack.model.decoder import Decoder, Trunk
from stack.model.huggingface import CONFIG, HEAD, TABLE, WEIGHTS, check_kind, model_of, own_head, untie
from stack.text import tokenizer
from stack.text.tokenizer import FILES, Tokenizer

INDEX = f"{WEIGHTS}.index.json"
NO_TENSORS = ".rotary_emb.inv_freq"  # old Llama files store the angles, which follow from rope_theta
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HELP = "a base is a run's folder or name, a checkpoint, or a Hugging Face folder (config.json, model.safetensors)"


@dataclass(frozen=True)
class Base:
    """A model in memory, as it lies on disk. Made by :func:`load_base` only."""

    folder: Path
    model: config.Model
    tokenizer: Tokenizer  # may have fewer tokens than the table rows, where the folder is not ours
    weights: dict[str, Tensor]  # float32 on the CPU, by parameter name; the table once
    moments: dict[str, Tensor]  # as ``exp_avg/model.norm.weight``; none where the folder is not ours
    manifest: checkpoint.Manifest | None  # of a checkpoint of ours

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.weights[TABLE].shape[0]


@dataclass(frozen=True)
class Tables:
    """What of a model has a row for each id. Made by :func:`load_tables` only."""

    folder: Path
    tokenizer: Tokenizer  # may have fewer tokens than the table rows, where the folder is not ours
    table: Tensor  # [rows, d] float32: the input embedding
    head: Tensor | None  # [rows, d] float32: the output embedding; None where it is the table
    manifest: checkpoint.Manifest | None  # of a checkpoint of ours


def load_base(where: str, runs_dir: str, show: Callable[[str], Any] = print) -> Base:
    """Open a run (its newest good checkpoint), a checkpoint, or a Hugging Face folder.

    Args:
        where: a folder, or the name of a run.
        runs_dir: where runs stand.
        show: hears of damaged checkpoints that are passed over, of ends that are none, and of characters that the
            vocabulary lacks.

    Raises:
        UserError: there is none, it is damaged, it contradicts itself, or it is no model that this program computes.
    """
    folder = _find(where, Path(runs_dir), show)
    base = _ours(folder) if (folder / MANIFEST).is_file() else _foreign(folder)
    _check_tokens(folder, base.tokenizer, base.num_rows)
    for remark in base.tokenizer.remarks:
        show(remark)
    if base.tokenizer.unknown is not None:
        what = base.tokenizer.unknown.pattern
        show(f"{folder}: the vocabulary has no token for the characters {what!r}; they are read as U+FFFD")
    return base


def load_tables(where: str, runs_dir: str, show: Callable[[str], Any] = print) -> Tables:
    """The table and, where it is another one, the head of what :func:`load_base` opens; of tied models and others.

    Nothing else is read, so what the decoder does not compute (the scaled angles of Llama 3, say) does not matter.
    The digests of a checkpoint of ours are verified.
    """
    folder = _find(where, Path(runs_dir), show)
    manifest = checkpoint.verify(folder) if (folder / MANIFEST).is_file() else None
    if manifest is None:
        _check_foreign(folder)
    settings, words = read_json(folder / CONFIG), tokenizer.load(folder)
    check_kind(settings, folder)
    if manifest is not None:
        _check_vocabulary(folder, words, manifest)
    weights = _read_weights(folder, (TABLE, HEAD))
    head = own_head(settings, weights, folder)
    _check_rows(folder, settings, weights[TABLE])
    _check_tokens(folder, words, len(weights[TABLE]))
    if head is not None and head.shape != weights[TABLE].shape:
        raise UserError(
            f"{folder}: {HEAD} is {list(head.shape)} and {TABLE} {list(weights[TABLE].shape)}; "
            "the files do not belong together: restore them"
        )
    return Tables(folder, words, weights[TABLE], head, manifest)


def has_template(folder: Path) -> bool:
    """Whether a model's folder has a chat template, in either of the places where ``transformers`` saves it."""
    return (folder / "chat_template.jinja").is_file() or bool(read_json(folder / FILES[1]).get("chat_template"))


def build(base: Base) -> Decoder:
    """The decoder with the weights of a base, on the CPU."""
    model = Decoder(base.model, base.num_rows)
    checkpoint.load_weights_into(model, base.weights)
    return model


def _find(where: str, runs: Path, show: Callable[[str], Any]) -> Path:
    """The folder of a model that ``where`` means."""
    candidates = [folder for folder in (Path(where), runs / where) if folder.is_dir()]
    for folder in candidates:
        if (folder / MANIFEST).is_file() or (folder / CONFIG).is_file():
            return folder
        if (folder / "checkpoints").is_dir():
            found = checkpoint.newest(folder / "checkpoints", show, owner=False)
            if found is None:
                raise UserError(f"{folder}: the run has no good checkpoint; let it go on with the command that made it")
            return found
    if candidates:
        raise UserError(f"{candidates[0]} holds neither {CONFIG} nor checkpoints/; {HELP}")
    names = sorted(path.parent.name for path in runs.glob("*/checkpoints"))
    raise UserError(f"there is no folder {where}, and no run of this name in {runs} ({_some(names)}); {HELP}")


def _ours(folder: Path) -> Base:
    """A checkpoint, with every digest verified."""
    loaded = checkpoint.load(folder)
    model, words = model_of(loaded.config, folder), tokenizer.load(folder)
    _check_vocabulary(folder, words, loaded.manifest)
    _check_weights(folder, model, loaded.config, loaded.weights)
    return Base(folder, model, words, loaded.weights, loaded.moments, loaded.manifest)


def _foreign(folder: Path) -> Base:
    """Any Hugging Face folder."""
    _check_foreign(folder)
    settings = read_json(folder / CONFIG)
    model = model_of(settings, folder)
    weights = untie(settings, _read_weights(folder), folder)
    _check_weights(folder, model, settings, weights)
    return Base(folder, model, tokenizer.load(folder), weights, {}, None)


def _check_foreign(folder: Path) -> None:
    if (folder / "training").is_dir():
        raise UserError(f"{folder}: a checkpoint of this program without its {MANIFEST}, so it is not whole; {HELP}")


def _check_vocabulary(folder: Path, words: Tokenizer, manifest: checkpoint.Manifest) -> None:
    if words.digest != manifest.vocabulary_digest:
        raise UserError(
            f"{folder}: the tokenizer's vocabulary is {words.digest}, {MANIFEST} names "
            f"{manifest.vocabulary_digest}; take another checkpoint"
        )


def _check_tokens(folder: Path, words: Tokenizer, rows: int) -> None:
    if rows < words.vocab_size:
        raise UserError(
            f"{folder}: the table has {rows:,} rows and the tokenizer {words.vocab_size:,} tokens, so some have no "
            "row; the files do not belong together: restore them"
        )


def _check_rows(folder: Path, settings: dict[str, Any], table: Tensor) -> None:
    if len(table) != settings.get("vocab_size"):
        raise UserError(
            f"{folder}: {CONFIG} says vocab_size={settings.get('vocab_size')}, but {TABLE} has {len(table)} rows; "
            "the files do not belong together: restore them"
        )


def _check_weights(folder: Path, model: config.Model, settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """UserError unless the tensors are exactly the parameters of the model that ``config.json`` describes."""
    _check_rows(folder, settings, weights[TABLE])
    with torch.device("meta"):
        trunk = Trunk(model, len(weights[TABLE]))
    try:
        checkpoint.check_fit({f"model.{name}": t.shape for name, t in trunk.state_dict().items()}, weights)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


# ---------------------------------------------------------------- tensors


def _read_weights(folder: Path, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of a folder as float32, all or those of a name in ``only``.

    They lie in ``model.safetensors``, or in the shards that its index names.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise _no_weights(folder)
        names = _shards(folder)
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            found = _tensors(folder / name, only)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); copy it again from where it came") from error
        twice = sorted(weights.keys() & found.keys())
        if twice:
            raise UserError(f"{folder / name} holds {_some(twice)}, which another shard holds too; restore the files")
        weights |= {key: _float(folder / name, key, value) for key, value in found.items() if NO_TENSORS not in key}
    return weights


def _tensors(path: Path, only: tuple[str, ...] | None) -> dict[str, Tensor]:
    if only is None:
        return safetensors.torch.load_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in only if name in file.keys()}  # noqa: SIM118  no mapping


def _shards(folder: Path) -> list[str]:
    """The files that the index names, all of them beside it."""
    named = read_json(folder / INDEX).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange or not names:
        raise UserError(f"{folder / INDEX}: weight_map names {_some(strange)} as shards; restore it")
    return names


def _float(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{path}: {name} is stored as {tensor.dtype}, so the weights are quantized; take the folder with float16, "
            "bfloat16 or float32 weights"
        )
    return tensor.float()


def _no_weights(folder: Path) -> UserError:
    """What lies in the place of the weights, and what to do about it."""
    patterns = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
    others = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    way_out = f"a base has {WEIGHTS} or {INDEX} with its shards"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in others):
        way_out = "pickle files can run code and are never opened; convert it with transformers' save_pretrained()"
    return UserError(f"{folder}: no {WEIGHTS}, but {_some(others)}; {way_out}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:6] + [f"and {len(names) - 6} more"] * (len(names) > 6)) or "none"
