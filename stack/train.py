"""``python -m stack.train``: tokenizer → packed data → pretraining. Finished stages with equal inputs are reused."""

from __future__ import annotations

from stack import job
from stack.config.entry import entry
from stack.config.schema import Config
from stack.data.packed import Packed
from stack.observe.compare import compare
from stack.text.tokenizer import Tokenizer
from stack.training.prepare import Materials, identity_of, materials, prepare_data
from stack.training.run_folder import FRESH, ResumePoint


def run(config: Config) -> int:
    """The whole of ``stack.train``; returns the exit code."""
    with job.started(config, config.branch) as own:
        if own.finished():
            return 0
        mode = own.choose_mode()
        tokenizer, packed = prepare_data(config, own.ranks, own.display.show, own.start)
        own.check_memory(config.model, tokenizer.vocab_size)
        return own.train(materials_of(config, tokenizer, packed, own.start), mode)


def materials_of(config: Config, tokenizer: Tokenizer, packed: Packed, start: ResumePoint = FRESH) -> Materials:
    """The materials of pretraining."""
    identity = identity_of(config, tokenizer, packed) | {"branch": start.branch}
    num_bytes = {name: source["validation"]["bytes"] for name, source in packed.manifest["sources"].items()}
    return materials(config, config.model, tokenizer, packed, identity, num_bytes=num_bytes)


main = entry("train", Config, run, compare=compare)

if __name__ == "__main__":
    main()
