"""A base to start from: a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama.

Everything that the decoder of this program does not compute is refused by name. A folder that only looks right would
train well and be another model than the one its files describe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stack.checkpoint.format import MANIFEST, Manifest, load, verify
from stack.checkpoint.manager import newest
from stack.checkpoint.tensors import check_fit, load_weights_into, read_weights
from stack.config import schema as config
from stack.core.errors import UserError, some
from stack.core.files import read_json
from stack.model.decoder import Decoder, Trunk
from stack.model.embedding import NAMES, row_parameters_of
from stack.model.huggingface import CONFIG, check_kind, check_rows, model_of, tables_of, untie
from stack.text import tokenizer as text
from stack.text.tokenizer import FILES, Tokenizer

HELP = "a base is a run's folder or name, a checkpoint, or a Hugging Face folder (config.json, model.safetensors)"


@dataclass(frozen=True)
class Base:
    """A model in memory, as it lies on disk. Made by :func:`load_base` only."""

    folder: Path
    model: config.Model
    tokenizer: Tokenizer  # may have fewer tokens than the table rows, where the folder is not ours
    weights: dict[str, Tensor]  # float32 on the CPU, by parameter name; the table once
    moments: dict[str, Tensor]  # as ``exp_avg/model.norm.weight``; none where the folder is not ours
    manifest: Manifest | None  # of a checkpoint of ours

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(row_parameters_of(self.weights)[0].tensor)


@dataclass(frozen=True)
class Tables:
    """What of a model has a row for each id. Made by :func:`load_tables` only."""

    folder: Path
    tokenizer: Tokenizer  # may have fewer tokens than the table rows, where the folder is not ours
    table: Tensor  # [rows, d] float32: the input embedding
    head: Tensor | None  # [rows, d] float32: the output embedding; None where it is the table
    manifest: Manifest | None  # of a checkpoint of ours


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
    manifest = verify(folder) if (folder / MANIFEST).is_file() else None
    if manifest is None:
        _check_foreign(folder)
    settings, tokenizer = read_json(folder / CONFIG), text.load(folder)
    check_kind(settings, folder)
    if manifest is not None:
        _check_vocabulary(folder, tokenizer, manifest)
    table, head = tables_of(settings, read_weights(folder, NAMES), folder)
    check_rows(settings, table, head, folder)
    _check_tokens(folder, tokenizer, len(table))
    return Tables(folder, tokenizer, table, head, manifest)


def has_template(folder: Path) -> bool:
    """Whether a model's folder has a chat template, in either of the places where ``transformers`` saves it."""
    return (folder / "chat_template.jinja").is_file() or bool(read_json(folder / FILES[1]).get("chat_template"))


def build(base: Base) -> Decoder:
    """The decoder with the weights of a base, on the CPU."""
    model = Decoder(base.model, base.num_rows)
    load_weights_into(model, base.weights)
    return model


def _find(where: str, runs: Path, show: Callable[[str], Any]) -> Path:
    """The folder of a model that ``where`` means."""
    candidates = [folder for folder in (Path(where), runs / where) if folder.is_dir()]
    for folder in candidates:
        if (folder / MANIFEST).is_file() or (folder / CONFIG).is_file():
            return folder
        if (folder / "checkpoints").is_dir():
            found = newest(folder / "checkpoints", show, owner=False)
            if found is None:
                raise UserError(f"{folder}: the run has no good checkpoint; let it go on with the command that made it")
            return found
    if candidates:
        raise UserError(f"{candidates[0]} holds neither {CONFIG} nor checkpoints/; {HELP}")
    names = sorted(path.parent.name for path in runs.glob("*/checkpoints"))
    raise UserError(f"there is no folder {where}, and no run of this name in {runs} ({some(names)}); {HELP}")


def _ours(folder: Path) -> Base:
    """A checkpoint, with every digest verified."""
    loaded = load(folder)
    model, tokenizer = model_of(loaded.config, folder), text.load(folder)
    _check_vocabulary(folder, tokenizer, loaded.manifest)
    _check_weights(folder, model, loaded.config, loaded.weights)
    return Base(folder, model, tokenizer, loaded.weights, loaded.moments, loaded.manifest)


def _foreign(folder: Path) -> Base:
    """Any Hugging Face folder."""
    _check_foreign(folder)
    settings = read_json(folder / CONFIG)
    model = model_of(settings, folder)
    weights = untie(settings, read_weights(folder), folder)
    _check_weights(folder, model, settings, weights)
    return Base(folder, model, text.load(folder), weights, {}, None)


def _check_foreign(folder: Path) -> None:
    if (folder / "training").is_dir():
        raise UserError(f"{folder}: a checkpoint of this program without its {MANIFEST}, so it is not whole; {HELP}")


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, manifest: Manifest) -> None:
    if tokenizer.digest != manifest.vocabulary_digest:
        raise UserError(
            f"{folder}: the tokenizer's vocabulary is {tokenizer.digest}, {MANIFEST} names "
            f"{manifest.vocabulary_digest}; take another checkpoint"
        )


def _check_tokens(folder: Path, tokenizer: Tokenizer, rows: int) -> None:
    if rows < tokenizer.vocab_size:
        raise UserError(
            f"{folder}: the table has {rows:,} rows and the tokenizer {tokenizer.vocab_size:,} tokens, so some have no "
            "row; the files do not belong together: restore them"
        )


def _check_weights(folder: Path, model: config.Model, settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """UserError unless the tensors are exactly the parameters of the model that ``config.json`` describes."""
    table = row_parameters_of(weights)[0].tensor
    check_rows(settings, table, None, folder)
    with torch.device("meta"):
        trunk = Trunk(model, len(table))
    try:
        check_fit({f"model.{name}": t.shape for name, t in trunk.state_dict().items()}, weights)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
