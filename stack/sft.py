"""``python -m stack.sft``: grows a base's vocabulary by the chat tokens, packs conversations, fine-tunes.

The grown base is saved as ``step-00000000`` of the run; from there on fine-tuning is the training that pretraining is.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from stack import answers, checkpoint, conversation, machine, run_folder, vocabulary
from stack.base import Base, build, load_base
from stack.config import FineTune, UserError, entry
from stack.data import packing
from stack.data.batches import Batches, Mixed, in_order
from stack.data.packing import Packed, open_packed, pack
from stack.diagnostics.memory import check_memory
from stack.diagnostics.rows import classify
from stack.distributed import Ranks, ranks
from stack.model.transformer import Decoder
from stack.optim import Optimizers
from stack.tokenizer import Tokenizer
from stack.tracking import Display
from stack.trainer import Split, State, Trainer
from stack.vocabulary import Growth
from stack.wandb_run import choose_mode

MEASURED = 64  # conversations on which growth is measured, held-out ones where there are any


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
        base = load_base(config.base, config.runs_dir)
        words, growth, packed = stages(config, base, here, display)
        if config.sft.show:
            here.on_main(lambda: show(packed, words, config.sft.show))
            return 0
        check_memory(base.model, config, words.vocab_size, device, here, display.show)
        if start.steps is None:  # no step was taken yet, so nothing is lost if the base is grown once more
            here.on_main(lambda: graft(config, base, words, growth, packed, display))
            start = _start(folder, config, here, display)
        model = Decoder(base.model, words.vocab_size, seed=config.seed).to(device)
        # What growth did stands in the checkpoint; what is learnt from is held against it by the trainer.
        identity = checkpoint.read_manifest(Path(str(start.checkpoint))).identity | _made_of(packed)
        data = split(config, base, packed, words, growth)
        return Trainer(config, model, data, words, identity, here, display).run(start, mode)


def _start(folder: Path, config: FineTune, here: Ranks, display: Display) -> run_folder.Start:
    return run_folder.Start(**here.on_main(lambda: asdict(run_folder.start_of(folder, config, display.show))))


def stages(config: FineTune, base: Base, here: Ranks, display: Display) -> tuple[Tokenizer, Growth, Packed]:
    """The grown tokenizer and the packed conversations, made by rank 0 where they are not there yet."""
    root, c = Path(config.data_dir), config
    if c.train.window > base.model.context:
        raise UserError(
            f"train.window={c.train.window} is longer than the context of the base, {base.model.context}; lower it"
        )

    def grown() -> tuple[Tokenizer, Growth]:
        return vocabulary.grow_tokenizer(base.tokenizer, base.num_rows, c.sft.tokens, conversation.TEMPLATE, root)

    def make() -> str:
        if c.chat.packed is not None:
            return c.chat.packed
        return str(pack(c.chat, grown()[0], root, display.show, window=c.train.window).folder)

    folder = Path(here.on_main(make))
    words, growth = grown()
    return words, growth, open_packed(folder, words)


def show(packed: Packed, words: Tokenizer, count: int) -> None:
    """Prints the first ``count`` packed conversations with what is supervised coloured."""
    found, console = packed.split("train"), Console(highlight=False, soft_wrap=True)
    marks = console.no_color or console.color_system is None  # what colour cannot say
    for number in range(min(count, found.num_documents)):
        start, length = int(found.starts[number]), int(found.lengths[number])
        ids, supervised = found.ids(start, length), found.supervised(start, length)
        console.rule(f"conversation {number} of {found.num_documents:,}: {supervised.sum()} of {length} supervised")
        console.print(conversation.coloured(words, ids.tolist(), supervised.tolist(), marks=marks))


def graft(config: FineTune, base: Base, words: Tokenizer, growth: Growth, packed: Packed, display: Display) -> None:
    """Saves the grown base as the run's checkpoint of step 0, with what growth did and what it cost."""
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
    measured_on = "validation" if packed.split("validation").num_documents else "train"
    measured = vocabulary.measure(growth, build(base), new, _plain_texts(packed.split(measured_on), base, words))
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
        identity=_identity(config, base, words, packed) | {"growth": growth.facts() | measured},
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


def _identity(config: FineTune, base: Base, words: Tokenizer, packed: Packed) -> dict[str, Any]:
    """What a checkpoint names of its making."""
    return {
        "run": config.name,
        "vocabulary": words.digest,
        "base": str(base.folder),
        "base_vocabulary": base.tokenizer.digest,
        "base_weights": checkpoint.digest_tensors(base.weights),
        **_made_of(packed),
    }


def _made_of(packed: Packed) -> dict[str, str]:
    return {"packed": packed.digest, "packed_folder": str(packed.folder)}


def split(config: FineTune, base: Base, packed: Packed, words: Tokenizer, growth: Growth) -> Split:
    """The batches of training, the windows of validation, and the questions."""
    t, s, held_out = config.train, config.sft, packed.split("validation")
    settings = {"window": t.window, "global_batch": t.global_batch, "seed": config.seed, "pad_id": words.pad}
    train = Batches(packed.split("train"), **settings)
    if t.epochs is not None:
        train.end = max(1, round(t.epochs * train.num_windows))
    if s.replay:
        train = Mixed(train, Batches(_replayed(config, base).split("train"), **settings), s.replay)
    asked = tuple(answers.questions(config.chat, words, s.answers, base.model.context)) if s.answers else ()
    classes = classify(packed.counts(), words, growth.initialized)
    return Split(train, in_order(held_out, t.window, words.pad), None, asked, s.answer_tokens, config.chat, classes)


def _replayed(config: FineTune, base: Base) -> Packed:
    """The pretraining data that are replayed; their ids mean the same in the grown vocabulary."""
    known = None if base.manifest is None else base.manifest.identity.get("packed_folder")
    folder = config.sft.replay_data or known
    if folder is None:
        raise UserError(
            f"sft.replay={config.sft.replay} needs packed pretraining text, and {base.folder} names none; "
            "give sft.replay_data=FOLDER, or sft.replay=0"
        )
    return open_packed(Path(folder), base.tokenizer)


main = entry("sft", FineTune, run)

if __name__ == "__main__":
    main()
