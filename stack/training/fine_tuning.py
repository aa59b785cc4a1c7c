"""What a fine-tuning is made of: a grown base, packed conversations, and text that is replayed.

The grown base is saved as ``step-00000000`` of the run; from there on fine-tuning is the training that pretraining is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack import checkpoint
from stack.checkpoint.open import Base, build, load_base
from stack.config.schema import FineTune, Model
from stack.core.errors import UserError
from stack.core.files import read_json
from stack.core.ranks import SHARED, Ranks
from stack.data.packed import Packed, Split, open_packed
from stack.data.packing import pack
from stack.model.decoder import Decoder
from stack.model.huggingface import CONFIG, model_of
from stack.text import template
from stack.text import tokenizer as text
from stack.text.tokenizer import Tokenizer
from stack.training import resuming, run_folder
from stack.training.optim import Optimizers
from stack.training.prepare import Materials, identity_of, materials
from stack.training.run_folder import ResumePoint
from stack.training.state import State
from stack.vocabulary.change import Growth
from stack.vocabulary.measure import measure
from stack.vocabulary.migrate import migrate
from stack.vocabulary.tokens import grow_tokenizer

MEASURED = 64  # conversations on which growth is measured, held-out ones where there are any


@dataclass(frozen=True)
class Parts:
    """What is fine-tuned, and on what. Opened by every rank."""

    model: Model
    tokenizer: Tokenizer  # grown
    initialized: tuple[int, ...]  # rows that growth gave a new meaning
    packed: Packed
    replay: Packed | None


# ---------------------------------------------------------------- of a new run


def from_base(config: FineTune, base: Base, ranks: Ranks, show: Callable[[str], None]) -> tuple[Parts, Growth]:
    """The parts of a new run: grown tokenizer and packed conversations, made by rank 0 where they are not there."""
    root, c = Path(config.data_dir), config

    def grown() -> tuple[Tokenizer, Growth]:
        return grow_tokenizer(base.tokenizer, base.num_rows, c.sft.tokens, template.TEMPLATE, root)

    def pack_them() -> str:
        if c.train.window > base.model.context:
            raise UserError(
                f"train.window={c.train.window} is longer than the context of the base, {base.model.context}; lower it"
            )
        return str(_pack(c, grown()[0], show))

    folder = Path(ranks.on_main(pack_them))
    tokenizer, growth = ranks.on_all(grown)
    packed, replay = ranks.on_all(lambda: (open_packed(folder, tokenizer), _replayed(c, base)), SHARED)
    return Parts(base.model, tokenizer, growth.initialized, packed, replay), growth


def graft(config: FineTune, base: Base, growth: Growth, parts: Parts, show: Callable[[str], None]) -> None:
    """Saves the grown base as the run's checkpoint of step 0, with what growth did and what it cost."""
    keep = config.sft.optimizer == "continue"
    if keep and not base.moments:
        show(f"{base.folder} has no optimizer state: the moments start at zero")
    weights, moments = migrate(growth, base.weights, base.moments if keep else {})
    new = Decoder(base.model, parts.tokenizer.vocab_size)
    checkpoint.load_weights_into(new, weights)
    try:
        Optimizers(new, config.optim).load_moments(moments)
    except UserError as error:
        raise UserError(f"{error}; or start without: sft.optimizer=fresh") from error
    grown = {"growth": growth.facts() | _measured(base, growth, new, parts, show)}
    checkpoint.save(
        run_folder.folder_of(config) / "checkpoints",
        0,
        model_config=base.model,
        tokenizer=parts.tokenizer,
        weights=weights,
        moments=moments,
        state=asdict(State()),
        identity=_identity(config, base, parts) | grown,
        metric=None,
    )


def _measured(base: Base, growth: Growth, new: Decoder, parts: Parts, show: Callable[[str], None]) -> dict[str, float]:
    """How far growth moves the answers, on conversations that are held out where any are; shown."""
    split, what = parts.packed.split("validation"), "held-out text"
    if not split.num_documents:
        split, what = parts.packed.split("train"), "training text: none is held out"
    found = measure(growth, build(base), new, _plain_texts(split, base, parts.tokenizer))
    show(growth.summary())
    show(
        f"  KL(base, grown) {found['kl']:.6f} nats, at most log(1 + M/V) = {found['bound']:.6f}; mass on the "
        f"initialized rows {found['mass']:.6f}; {found['positions']:,} positions of {what}"
    )
    return found


def _plain_texts(split: Split, base: Base, tokenizer: Tokenizer) -> list[list[int]]:
    """Conversations as the base can read them: without their control tokens."""
    control = list(tokenizer.control.values())
    texts = []
    for start, length in zip(split.starts[:MEASURED], split.lengths[:MEASURED], strict=True):
        ids = split.ids(int(start), int(length))
        texts.append([tokenizer.end_of_text, *ids[~np.isin(ids, control)].tolist()][: base.model.context])
    return texts


def _identity(config: FineTune, base: Base, parts: Parts) -> dict[str, Any]:
    """What the checkpoint of step 0 names of its making."""
    return identity_of(config, parts.tokenizer, parts.packed, parts.replay) | {
        "base": str(run_folder.unlinked(base.folder)),
        "base_vocabulary": base.tokenizer.digest,
        "base_weights": checkpoint.digest_tensors(base.weights),
    }


def _replayed(config: FineTune, base: Base) -> Packed | None:
    """The pretraining data that are replayed; their ids mean the same in the grown vocabulary."""
    if not config.sft.replay:
        return None
    identity = {} if base.manifest is None else base.manifest.identity
    named = identity.get("packed_folder")
    if named is not None and config.sft.replay_data is None:
        named = resuming.find_packed(named, identity.get("packed"), base.folder, Path(config.data_dir)) or named
    folder = config.sft.replay_data or named
    if folder is None:
        raise UserError(
            f"sft.replay={config.sft.replay} needs packed pretraining text, and {base.folder} names none; "
            "give sft.replay_data=FOLDER, or sft.replay=0"
        )
    return open_packed(Path(folder), base.tokenizer)


# ---------------------------------------------------------------- of a run that goes on


def from_checkpoint(config: FineTune, start: ResumePoint, ranks: Ranks, show: Callable[[str], None]) -> Parts:
    """The parts of a run that goes on, by its own checkpoint; the base and the conversations may be gone."""
    folder, root = Path(str(start.checkpoint)), Path(config.data_dir)

    def find() -> str:
        return str(resuming.packed_of(start, root, lambda: _pack(config, text.load(folder), show), show))

    packed = Path(ranks.on_main(find))

    def opened() -> Parts:
        identity, tokenizer = checkpoint.read_manifest(folder).identity, text.load(folder)
        model = model_of(read_json(folder / CONFIG), folder)
        ranges = (part["rows"] for part in identity["growth"]["initialized"])
        initialized = tuple(row for first, last in ranges for row in range(first, last + 1))
        replay = _replayed_before(config, folder, identity, show)
        return Parts(model, tokenizer, initialized, open_packed(packed, tokenizer), replay)

    return ranks.on_all(opened, SHARED)


def _replayed_before(
    config: FineTune, folder: Path, identity: dict[str, Any], show: Callable[[str], None]
) -> Packed | None:
    """The pretraining data that a checkpoint names as replayed; an older version's names none, but its base does."""
    if not config.sft.replay:
        return None
    if "replay" not in identity:
        try:
            return _replayed(config, load_base(config.base, config.runs_dir, show))
        except UserError as error:
            raise UserError(
                f"{folder} was saved by an older version, and only its base knows which text sft.replay="
                f"{config.sft.replay} repeats: {error}; bring the base back"
            ) from error
    root = Path(config.data_dir)
    found = resuming.find_packed(identity["replay_folder"], identity["replay"], folder, root)
    if found is None:
        raise UserError(
            f"{folder} replays the packed text {identity['replay_folder']} (digest {identity['replay']}), which is "
            f"neither there nor in {root / 'packed'}; bring it back"
        )
    return open_packed(found)


# ---------------------------------------------------------------- of both


def _pack(config: FineTune, tokenizer: Tokenizer, show: Callable[[str], None]) -> Path:
    if config.chat.packed is not None:
        return open_packed(Path(config.chat.packed)).folder
    return pack(config.chat, tokenizer, Path(config.data_dir), show, window=config.train.window).folder


def materials_of(config: FineTune, parts: Parts, named: dict[str, Any]) -> Materials:
    """The materials of a run; ``named`` is what its grown base names of its making, growth too."""
    return materials(
        config,
        parts.model,
        parts.tokenizer,
        parts.packed,
        named | identity_of(config, parts.tokenizer, parts.packed, parts.replay),
        initialized=parts.initialized,
        replayed=None if parts.replay is None else (parts.replay, config.sft.replay),
    )
