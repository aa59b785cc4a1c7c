"""``python -m stack.train``: tokenizer → packed data → pretraining. Finished stages with equal inputs are reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from stack.checkpoint.manager import read_manifest
from stack.config.schema import Config, UserError, entry
from stack.core import machine
from stack.core.ranks import SHARED, Ranks, ranks
from stack.data.batches import Batches, in_order
from stack.data.packing import Packed, open_packed, pack
from stack.model.decoder import Decoder
from stack.observe.compare import compare
from stack.observe.memory import check_memory
from stack.text import tokenizer
from stack.tracking.metrics import Display
from stack.tracking.wandb_run import choose_mode
from stack.training import resuming, run_folder
from stack.training.trainer import Split, Trainer
from stack.vocabulary.classes import classify


def run(config: Config) -> int:
    """The whole of ``stack.train``; returns the exit code."""
    device = machine.choose_device(config.device)
    folder = run_folder.folder_of(config)
    with ranks(config.parallel.kind, device) as here, run_folder.locked(folder, here):
        display = Display(here.main)
        told = here.on_main(lambda: asdict(run_folder.start_of(folder, config, display.show, config.branch)))
        start = run_folder.Start(**told)
        if start.finished:
            display.show(f"finished already: step {start.step} of {start.steps}; checkpoint: {start.checkpoint}")
            return 0
        mode = here.on_main(lambda: choose_mode(config.track, folder, display.show))
        words, packed = stages(config, here, display, start)
        here.on_all(lambda: check_memory(config.model, config, words.vocab_size, device, here, display.show))
        model = Decoder(config.model, words.vocab_size, seed=config.seed).to(device)
        named = identity(config, words, packed, start)
        return Trainer(config, model, split(config, packed, words), words, named, here, display).run(start, mode)


def stages(
    config: Config, here: Ranks, display: Display, start: run_folder.Start = run_folder.FRESH
) -> tuple[tokenizer.Tokenizer, Packed]:
    """Tokenizer and packed data, made by rank 0 where they are not there yet, then opened by every rank."""
    folders = [Path(folder) for folder in here.on_main(lambda: _folders(config, start, display.show))]

    def opened() -> tuple[tokenizer.Tokenizer, Packed]:
        if start.checkpoint is not None:
            read_manifest(Path(start.checkpoint))  # is it there on every rank?
        words = tokenizer.load(folders[0])
        return words, open_packed(folders[1], words)

    return here.on_all(opened, SHARED)


def _folders(config: Config, start: run_folder.Start, show: Callable[[str], None]) -> list[str]:
    """Those of the tokenizer and of the packed data: of a run that goes on, what its checkpoint was trained with."""
    root = Path(config.data_dir)

    def packed_with(words: tokenizer.Tokenizer) -> Path:
        named = config.data.packed
        return (open_packed(Path(named)) if named else pack(config.data, words, root, show)).folder

    if start.resumed:
        packed = resuming.packed_of(start, root, lambda: packed_with(tokenizer.load(str(start.checkpoint))), show)
        return [str(start.checkpoint), str(packed)]
    try:
        words = tokenizer.train(config.tokenizer, config.data, root, show)
        return [str(words.folder), str(packed_with(words))]
    except UserError as error:
        packed = resuming.packed_of_parent(start, config, root) if start.branched else None
        if packed is None:
            raise
        show(f"the branch learns from {packed}, as {start.checkpoint} did, for its own data cannot be made: {error}")
        return [str(start.checkpoint), str(packed)]


def split(config: Config, packed: Packed, words: tokenizer.Tokenizer) -> Split:
    """The batches of training and the windows of validation."""
    t, held_out = config.train, packed.split("validation")
    train = Batches(
        packed.split("train"), window=t.window, global_batch=t.global_batch, seed=config.seed, pad_id=words.pad
    )
    if t.epochs is not None:
        train.end = max(1, round(t.epochs * train.num_windows))
    num_bytes = {name: source["validation"]["bytes"] for name, source in packed.manifest["sources"].items()}
    classes = classify(packed.counts(), words)
    return Split(train, in_order(held_out, t.window, words.pad), num_bytes, classes=classes)


def identity(
    config: Config, words: tokenizer.Tokenizer, packed: Packed, start: run_folder.Start = run_folder.FRESH
) -> dict[str, str | None]:
    """What a checkpoint names of its making."""
    return {
        "run": config.name,
        "vocabulary": words.digest,
        "packed": packed.digest,
        "packed_folder": str(packed.folder),
        "branch": start.branch,
    }


main = entry("train", Config, run, compare=compare)

if __name__ == "__main__":
    main()
