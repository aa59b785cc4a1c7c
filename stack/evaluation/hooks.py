"""Validation, answers and samples, at the steps where they are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stack.config.schema import FineTune
from stack.core.errors import UserError
from stack.data.batches import Windows
from stack.evaluation import answers
from stack.evaluation.answers import Question
from stack.evaluation.validation import Validation, validate
from stack.text.tokenizer import Tokenizer
from stack.training.hooks import Every, Hook, Moment
from stack.training.trainer import Step


class Validate(Hook):
    """Measures the model on what is held out, and has it answer held-out conversations.

    Args:
        step: of the run.
        held_out: its validation windows; none where nothing is held out.
        num_bytes: UTF-8 bytes of their text by source, for bits per byte.
        classes: of every row, int64 [V]; see :mod:`stack.vocabulary.classes`.
        answered: answers and judges the held-out conversations: ``CHECK_SOURCE``, a share; empty where there are none.
        show: tells a person one line.
        wait: shows what goes on meanwhile.
    """

    def __init__(
        self,
        step: Step,
        held_out: Windows,
        num_bytes: dict[str, int] | None,
        classes: np.ndarray | None,
        answered: Callable[[], dict[str, float]],
        show: Callable[[str], None],
        wait: Callable[[str], None],
    ):
        self.step, self.held_out, self.num_bytes, self.classes = step, held_out, num_bytes, classes
        self.answered, self.show, self.wait = answered, show, wait
        self.every = Every(step.config.evaluate.every)
        self.last: dict[str, float] = {}  # what was found last

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """The figures of validation and answers, ``eval/NAME``; of neither where nothing is held out."""
        if not self.every.due(moment):
            return {}
        values = self.validation().figures() if self.held_out.num_windows else {}
        finite = math.isfinite(values.get("loss", 0.0))
        if finite:  # a model that is not finite answers nothing
            values |= self.answered()
        self.last = values if finite else {}  # JSON has no NaN
        if "loss" in values:
            self.show(f"step {moment.state.step}: {_shown(values)}")
        return {f"eval/{key}": value for key, value in values.items()}

    def validation(self) -> Validation:
        """One pass over the whole validation split, as the model stands."""
        with self.step.autocast():
            return validate(
                self.step.model,
                self.held_out,
                self.num_bytes,
                micro_batch=self.step.config.evaluate.micro_batch,
                chunk_tokens=self.step.config.train.chunk_tokens,
                classes=self.classes,
                ranks=self.step.ranks,
                device=self.step.device,
                progress=lambda done, of: self.wait(f"validation: window {done} of {of}"),
            )

    def described(self) -> str:
        """The latest validation in a few words."""
        if "loss" in self.last:
            return _shown(self.last)
        return "no validation yet" if self.held_out.num_windows else "no validation"

    def quality(self) -> tuple[str, float | None]:
        """The figure that says how good the model is, by name; None where it is not finite."""
        best = "bits_per_byte" if "bits_per_byte" in self.last else "loss"
        return best.replace("_", " "), self.last.get(best)

    def state(self) -> dict[str, Any]:
        """The latest figures."""
        return {"last": self.last}

    def load(self, values: dict[str, Any]) -> None:
        """Takes them back."""
        self.last = values.pop("last", {})


def _shown(values: dict[str, float]) -> str:
    bits = f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
    return f"validation {values['loss']:.4f} nats per token{bits}"


def answered(
    step: Step,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    config: FineTune,
    show: Callable[[str], None],
) -> dict[str, float]:
    """Held-out conversations answered and judged: ``CHECK_SOURCE``, a share; shown as a table."""
    asked = answers.shard(list(questions), step.ranks)
    with step.autocast():
        made = answers.answer(step.model, tokenizer, asked, config.sft.answer_tokens)
    table = answers.judge(made, config.chat.resolved_sources(), step.ranks)
    for line in answers.lines(table):
        show(line)
    return {f"{check}_{source}": value for source, checks in table.items() for check, value in checks.items()}


class Sample(Hook):
    """Shows how the model goes on with some prompts, on rank 0.

    Args:
        step: of the run.
        sample: makes the texts, each with its prompt in front.
        show: tells a person one line.
    """

    def __init__(self, step: Step, sample: Callable[[], list[str]], show: Callable[[str], None]):
        self.step, self.sample, self.show = step, sample, show
        self.every = Every(step.config.sample.every)

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """``samples/texts``."""
        if not self.every.due(moment):
            return {}
        try:
            texts = self._texts()
        except UserError as error:  # what there is to look at must not cost what is to be saved
            self.show(f"  no samples: {error}")
            return {}
        for text in texts:
            self.show(f"  sample: {text!r}")
        return {"samples/texts": texts}

    def _texts(self) -> list[str]:
        if not self.step.ranks.main or not self.step.config.sample.prompts:
            return []
        with self.step.autocast():
            return self.sample()
