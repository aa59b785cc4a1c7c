"""``python -m stack.sft``: grows a base's vocabulary by the chat tokens, packs conversations, fine-tunes.

The grown base is saved as ``step-00000000`` of the run; from there on fine-tuning is the training that pretraining is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from stack.checkpoint import manager as checkpoint
from stack.checkpoint.open import Base, build, load_base
from stack.config.schema import FineTune, Model, UserError, entry
from stack.core import machine
from stack.core.files import read_json
from stack.core.ranks import SHARED, Ranks, ranks
from stack.data import packing
from stack.data.batches import Batches, Mixed, in_order
from stack.data.packing import Packed, open_packed, pack
from stack.evaluation import answers
from stack.evaluation.answers import Question
from stack.model.decoder import Decoder
from stack.model.huggingface import CONFIG, model_of
from stack.observe.compare import compare
from stack.observe.memory import check_memory
from stack.text import conversation, tokenizer
from stack.text.tokenizer import Tokenizer
from stack.tracking.metrics import Display
from stack.tracking.wandb_run import choose_mode
from stack.training import resuming, run_folder
from stack.training.optim import Optimizers
from stack.training.trainer import Split, State, Trainer
from stack.vocabulary import change as vocabulary
from stack.vocabulary.change import Growth
from stack.vocabulary.classes import classify

MEASURED = 64  # conversations on which growth is measured, held-out ones where there are any


@dataclass(frozen=True)
class Made:
    """What is fine-tuned, and on what. Opened by every rank."""

    model: Model
    words: Tokenizer  # grown
    initialized: tuple[int, ...]  # rows that growth gave a new meaning
    packed: Packed
    replay: Packed | None


def run(config: FineTune) -> int:
    """The whole of ``stack.sft``; returns the exit code."""
    device = machine.choose_device(config.device)
    folder = run_folder.folder_of(config)
    with ranks(config.parallel.kind, device) as here, run_folder.locked(folder, here):
        display = Display(here.main)
        start = _start(folder, config, here, display)
        if start.finished and not config.sft.show:
            display.show(f"finished already: step {start.step} of {start.steps}; checkpoint: {start.checkpoint}")
            return 0
        mode = "disabled" if config.sft.show else here.on_main(lambda: choose_mode(config.track, folder, display.show))
        again = start.resumed
        if again:
            made = made_before(config, start, here, display)
        else:
            base = here.on_all(lambda: load_base(config.base, config.runs_dir, display.show), SHARED)
            made, growth = stages(config, base, here, display)
        if config.sft.show:
            here.on_main(lambda: show(made.packed, made.words, config.sft.show))
            return 0
        here.on_all(lambda: check_memory(made.model, config, made.words.vocab_size, device, here, display.show))
        if not again:  # no step was taken yet, so nothing is lost if the base is grown once more
            here.on_main(lambda: graft(config, base, growth, made, display))
            start = _start(folder, config, here, display)
        model = Decoder(made.model, made.words.vocab_size, seed=config.seed).to(device)
        # What growth did stands in the checkpoint; what is learnt from is held against it by the trainer.
        manifest = here.on_all(lambda: checkpoint.read_manifest(Path(str(start.checkpoint))), SHARED)
        data = split(config, made, _questions(config, made, here, display, kept=again))
        identity = manifest.identity | _made_of(made)
        return Trainer(config, model, data, made.words, identity, here, display).run(start, mode)


def _questions(config: FineTune, made: Made, here: Ranks, display: Display, *, kept: bool) -> tuple[Question, ...]:
    folder, context = run_folder.folder_of(config), made.model.context
    found = here.on_main(lambda: answers.of_run(folder, config, made.words, context, display.show, kept=kept))
    return tuple(map(Question.of, found))


def _start(folder: Path, config: FineTune, here: Ranks, display: Display) -> run_folder.Start:
    return run_folder.Start(**here.on_main(lambda: asdict(run_folder.start_of(folder, config, display.show))))


def stages(config: FineTune, base: Base, here: Ranks, display: Display) -> tuple[Made, Growth]:
    """What a new run is made of: grown tokenizer and packed conversations, made by rank 0 where they are not there."""
    root, c = Path(config.data_dir), config

    def grown() -> tuple[Tokenizer, Growth]:
        return vocabulary.grow_tokenizer(base.tokenizer, base.num_rows, c.sft.tokens, conversation.TEMPLATE, root)

    def pack_them() -> str:
        if c.train.window > base.model.context:
            raise UserError(
                f"train.window={c.train.window} is longer than the context of the base, {base.model.context}; lower it"
            )
        return str(_pack(c, grown()[0], display))

    folder = Path(here.on_main(pack_them))
    words, growth = here.on_all(grown)
    packed, replay = here.on_all(lambda: (open_packed(folder, words), _replayed(c, base)), SHARED)
    return Made(base.model, words, growth.initialized, packed, replay), growth


def made_before(config: FineTune, start: run_folder.Start, here: Ranks, display: Display) -> Made:
    """What a run that goes on is made of, by its own checkpoint; the base and the conversations may be gone."""
    folder, root = Path(str(start.checkpoint)), Path(config.data_dir)

    def find() -> str:
        pack_anew = lambda: _pack(config, tokenizer.load(folder), display)  # noqa: E731
        return str(resuming.packed_of(start, root, pack_anew, display.show))

    packed = Path(here.on_main(find))

    def opened() -> Made:
        identity, words = checkpoint.read_manifest(folder).identity, tokenizer.load(folder)
        model = model_of(read_json(folder / CONFIG), folder)
        initialized = tuple(row for part in identity["growth"]["initialized"] for row in _range(*part["rows"]))
        replay = _replayed_before(config, folder, identity, display)
        return Made(model, words, initialized, open_packed(packed, words), replay)

    return here.on_all(opened, SHARED)


def _range(first: int, last: int) -> range:
    return range(first, last + 1)


def _pack(config: FineTune, words: Tokenizer, display: Display) -> Path:
    if config.chat.packed is not None:
        return open_packed(Path(config.chat.packed)).folder
    return pack(config.chat, words, Path(config.data_dir), display.show, window=config.train.window).folder


def show(packed: Packed, words: Tokenizer, count: int) -> None:
    """Prints the first ``count`` packed conversations with what is supervised coloured."""
    found, console = packed.split("train"), Console(highlight=False, soft_wrap=True)
    marks = console.no_color or console.color_system is None  # what colour cannot say
    for number in range(min(count, found.num_documents)):
        start, length = int(found.starts[number]), int(found.lengths[number])
        ids, supervised = found.ids(start, length), found.supervised(start, length)
        console.rule(f"conversation {number} of {found.num_documents:,}: {supervised.sum()} of {length} supervised")
        console.print(conversation.coloured(words, ids.tolist(), supervised.tolist(), marks=marks))


def graft(config: FineTune, base: Base, growth: Growth, made: Made, display: Display) -> None:
    """Saves the grown base as the run's checkpoint of step 0, with what growth did and what it cost."""
    words = made.words
    keep = config.sft.optimizer == "continue"
    if keep and not base.moments:
        display.show(f"{base.folder} has no optimizer state: the moments start at zero")
    weights, moments = vocabulary.migrate(growth, base.weights, base.moments if keep else {})
    new = Decoder(base.model, words.vocab_size)
    checkpoint.load_weights_into(new, weights)
    try:
        Optimizers(new, config.optim).load_moments(moments)
    except UserError as error:
        raise UserError(f"{error}; or start without: sft.optimizer=fresh") from error
    measured_on = "validation" if made.packed.split("validation").num_documents else "train"
    measured = vocabulary.measure(growth, build(base), new, _plain_texts(made.packed.split(measured_on), base, words))
    what = "held-out text" if measured_on == "validation" else "training text: none is held out"
    display.show(growth.summary())
    display.show(
        f"  KL(base, grown) {measured['kl']:.6f} nats, at most log(1 + M/V) = {measured['bound']:.6f}; mass on the "
        f"initialized rows {measured['mass']:.6f}; {measured['positions']:,} positions of {what}"
    )
    checkpoint.save(
        run_folder.folder_of(config) / "checkpoints",
        0,
        model_config=base.model,
        tokenizer=words,
        weights=weights,
        moments=moments,
        state=asdict(State()),
        identity=_identity(config, base, made) | {"growth": growth.facts() | measured},
        metric=None,
    )


def _plain_texts(split: packing.Split, base: Base, words: Tokenizer) -> list[list[int]]:
    """Conversations as the base can read them: without their control tokens."""
    control = list(words.control.values())
    texts = []
    for start, length in zip(split.starts[:MEASURED], split.lengths[:MEASURED], strict=True):
        ids = split.ids(int(start), int(length))
        texts.append([words.end_of_text, *ids[~np.isin(ids, control)].tolist()][: base.model.context])
    return texts


def _identity(config: FineTune, base: Base, made: Made) -> dict[str, Any]:
    """What a checkpoint names of its making."""
    return {
        "run": config.name,
        "vocabulary": made.words.digest,
        "base": str(run_folder.unlinked(base.folder)),
        "base_vocabulary": base.tokenizer.digest,
        "base_weights": checkpoint.digest_tensors(base.weights),
        **_made_of(made),
    }


def _made_of(made: Made) -> dict[str, str]:
    found = {"packed": made.packed.digest, "packed_folder": str(made.packed.folder)}
    if made.replay is not None:
        found |= {"replay": made.replay.digest, "replay_folder": str(made.replay.folder)}
    return found


def split(config: FineTune, made: Made, questions: tuple[Question, ...] = ()) -> Split:
    """The batches of training, the windows of validation, and the questions that are asked there."""
    t, words, packed = config.train, made.words, made.packed
    settings = {"window": t.window, "global_batch": t.global_batch, "seed": config.seed, "pad_id": words.pad}
    train = Batches(packed.split("train"), **settings)
    if t.epochs is not None:
        train.end = max(1, round(t.epochs * train.num_windows))
    if made.replay is not None:
        train = Mixed(train, Batches(made.replay.split("train"), **settings), config.sft.replay)
    classes = classify(packed.counts(), words, made.initialized)
    held_out = in_order(packed.split("validation"), t.window, words.pad)
    return Split(train, held_out, None, questions, config.sft.answer_tokens, config.chat, classes)


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


def _replayed_before(config: FineTune, folder: Path, identity: dict[str, Any], display: Display) -> Packed | None:
    """The pretraining data that a checkpoint names as replayed; an older version's names none, but its base does."""
    if not config.sft.replay:
        return None
    if "replay" not in identity:
        try:
            return _replayed(config, load_base(config.base, config.runs_dir, display.show))
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


main = entry("sft", FineTune, run, positional="base", compare=compare)

if __name__ == "__main__":
    main()
