"""``python -m stack.sft``: grows a base's vocabulary by the chat tokens, packs conversations, fine-tunes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from stack import job
from stack.checkpoint import read_manifest
from stack.checkpoint.open import load_base
from stack.config.entry import entry
from stack.config.schema import FineTune
from stack.core.ranks import SHARED
from stack.data.packed import Packed
from stack.evaluation import answers
from stack.evaluation.answers import Question
from stack.job import Job
from stack.observe.compare import compare
from stack.text import conversation
from stack.text.tokenizer import Tokenizer
from stack.training import fine_tuning


def run(config: FineTune) -> int:
    """The whole of ``stack.sft``; returns the exit code."""
    with job.started(config) as own:
        show = own.display.show
        if not config.sft.show and own.finished():
            return 0
        mode = "disabled" if config.sft.show else own.choose_mode()
        kept = own.start.resumed
        if kept:
            parts = fine_tuning.from_checkpoint(config, own.start, own.ranks, show)
        else:
            base = own.ranks.on_all(lambda: load_base(config.base, config.runs_dir, show), SHARED)
            parts, growth = fine_tuning.from_base(config, base, own.ranks, show)
        if config.sft.show:
            own.ranks.on_main(lambda: show_packed(parts.packed, parts.tokenizer, config.sft.show))
            return 0
        own.check_memory(parts.model, parts.tokenizer.vocab_size)
        if not kept:  # no step was taken yet, so nothing is lost if the base is grown once more
            own.ranks.on_main(lambda: fine_tuning.graft(config, base, growth, parts, show))
            own.start = job.resume_point(config, own.ranks, own.display)
        manifest = own.ranks.on_all(lambda: read_manifest(Path(str(own.start.checkpoint))), SHARED)
        made = fine_tuning.materials_of(config, parts, manifest.identity)
        return own.train(made, mode, _questions(config, own, parts, kept=kept))


def _questions(config: FineTune, own: Job, parts: fine_tuning.Parts, *, kept: bool) -> list[Question]:
    """Held-out conversations that are asked at every validation; the same on every rank."""
    context, show = parts.model.context, own.display.show
    found = own.ranks.on_main(lambda: answers.of_run(own.folder, config, parts.tokenizer, context, show, kept=kept))
    return list(map(Question.of, found))


def show_packed(packed: Packed, tokenizer: Tokenizer, count: int) -> None:
    """Prints the first ``count`` packed conversations with what is supervised coloured."""
    found, console = packed.split("train"), Console(highlight=False, soft_wrap=True)
    marks = console.no_color or console.color_system is None  # what colour cannot say
    for number in range(min(count, found.num_documents)):
        start, length = int(found.starts[number]), int(found.lengths[number])
        ids, supervised = found.ids(start, length), found.supervised(start, length)
        console.rule(f"conversation {number} of {found.num_documents:,}: {supervised.sum()} of {length} supervised")
        console.print(conversation.coloured(tokenizer, ids.tolist(), supervised.tolist(), marks=marks))


main = entry("sft", FineTune, run, positional="base", compare=compare)

if __name__ == "__main__":
    main()
