"""``python -m stack.train``: tokenizer → packed data → pretraining. Finished stages with equal inputs are reused."""

from __future__ import annotations

from pathlib import Path

from stack import machine, run_folder, tokenizer
from stack.config import Config, UserError, entry
from stack.data.batches import Batches, in_order
from stack.data.packing import Packed, open_packed, pack
from stack.distributed import Ranks, ranks
from stack.model.transformer import Decoder
from stack.tracking import Display
from stack.trainer import Split, Trainer


def run(config: Config) -> int:
    """The whole of ``stack.train``; returns the exit code."""
    device = machine.choose_device(config.device)
    with ranks(config.parallel.kind, device) as here:
        display = Display(here.main)
        folder = Path(config.runs_dir) / config.name
        with run_folder.locked(folder, here):
            words, packed = stages(config, here, display)
            trainer = Trainer(
                config,
                build(config, words, device, display),
                split(config, packed, words),
                words,
                identity(config, words, packed),
                here,
                display,
            )
            return trainer.run()


def stages(config: Config, here: Ranks, display: Display) -> tuple[tokenizer.Tokenizer, Packed]:
    """Tokenizer and packed data, made by rank 0 where they are not there yet, then opened by every rank."""
    root = Path(config.data_dir)

    def make() -> list[str]:
        given = config.tokenizer.folder
        words = (
            tokenizer.load(Path(given)) if given else tokenizer.train(config.tokenizer, config.data, root, display.show)
        )
        packed = Path(config.data.packed) if config.data.packed else pack(config.data, words, root, display.show).folder
        return [str(words.folder), str(packed)]

    folders = [Path(folder) for folder in here.on_main(make)]
    words, packed = tokenizer.load(folders[0]), open_packed(folders[1])
    if words.digest != packed.vocabulary_digest:
        raise UserError(
            f"the packed data {packed.folder} were made with another vocabulary: {packed.num_rows} rows, digest "
            f"{packed.vocabulary_digest}; the tokenizer {words.folder} has {words.vocab_size}, digest {words.digest}; "
            "set data.packed=null to pack anew, or give tokenizer.folder=FOLDER of the tokenizer that made them"
        )
    return words, packed


def build(config: Config, words: tokenizer.Tokenizer, device: str, display: Display) -> Decoder:
    """The model on its device, compiled where that is wanted and works."""
    model = Decoder(config.model, words.vocab_size, seed=config.seed).to(device)
    display.show(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {run_folder.describe(config)}")
    if config.compile != "off":
        why = machine.compiler_works(device)
        if why and config.compile == "on":
            raise UserError(f"compile=on, but nothing can be compiled here: {why}; use compile=auto or compile=off")
        if why:
            display.show(f"not compiled: {why}")
        else:
            model.compile_blocks()
    return model


def split(config: Config, packed: Packed, words: tokenizer.Tokenizer) -> Split:
    """The batches of training and the windows of validation."""
    t = config.train
    train = Batches(
        packed.split("train"), window=t.window, global_batch=t.global_batch, seed=config.seed, pad_id=words.pad
    )
    held_out = packed.split("validation")
    return Split(train, in_order(held_out, t.window, words.pad), held_out.num_bytes)


def identity(config: Config, words: tokenizer.Tokenizer, packed: Packed) -> dict[str, str | None]:
    """What a checkpoint names of its making."""
    return {
        "run": config.name,
        "vocabulary": words.digest,
        "packed": packed.digest,
        "packed_folder": str(packed.folder),
        "branch": config.branch,
    }


main = entry("train", run)

if __name__ == "__main__":
    main()
