"""A conversation with a model, and what becomes of it where it outgrows the context."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from stack.config.schema import Chat
from stack.core.errors import UserError
from stack.core.machine import choose_precision
from stack.evaluation.generate import Sampling, stream
from stack.model.decoder import Decoder
from stack.text import conversation
from stack.text.messages import Message
from stack.text.tokenizer import Tokenizer


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile takes effect afterwards."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@dataclass
class ChatSession:
    """A conversation with a model.

    Where it outgrows the model's context, the oldest turns are dropped, each question with its answer and never the
    system turn, until at least min(``tokens``, context / 4) positions are left for the answer.
    """

    model: Decoder
    tokenizer: Tokenizer
    config: Chat
    note: Callable[[str], object]  # hears that turns are dropped
    system: list[Message] = field(default_factory=list)  # one or none
    turns: list[Message] = field(default_factory=list)  # a question and its answer, again and again
    told: bool = False  # that turns are dropped

    @property
    def completes(self) -> bool:
        """True where the vocabulary has no chat tokens, so texts are continued."""
        return self.tokenizer.end_of_turn is None

    def set_system(self, text: str) -> None:
        """Sets the system turn; an empty one removes it; UserError where the model knows none."""
        if text and self.completes:
            raise UserError("the model has no chat tokens, so it knows no system turn; go without one")
        self.system = [Message(role="system", content=text)] if text else []

    def answer(self, text: str, show: Callable[[str], object]) -> None:
        """Shows the answer to a message piece by piece; both are remembered, after Ctrl-C what there was of it.

        UserError, and nothing is forgotten: the message is too long for the context.
        """
        c, device = self.config, self.model.table.device.type
        prompt, dtype = self._prompt(text), choose_precision(c.precision, device)
        drawing = Sampling(c.temperature, c.top_k, c.top_p, c.seed)
        reply = Message(role="assistant", content="")
        self.turns += [] if self.completes else [Message(role="user", content=text), reply]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            for piece in stream(self.model, self.tokenizer, prompt, tokens=c.tokens, sampling=drawing):
                with _uninterrupted():  # what was shown is what is remembered
                    reply["content"] += piece
                    show(piece)

    def _prompt(self, text: str) -> list[int]:
        """The ids of the conversation with a new message, or of a text to be continued."""
        context = self.model.config.context
        room = context - max(1, min(self.config.tokens, context // 4))
        for start in range(0, len(self.turns) + 1, 2):
            ids = self._ids([*self.system, *self.turns[start:], Message(role="user", content=text)])
            if len(ids) <= room:
                break
        else:
            system = " with the system turn" if self.system else ""
            raise UserError(
                f"the message{system} makes a prompt of {len(ids):,} tokens, and at most {room:,} fit: the model's "
                f"context is {context:,}, and the rest is for the answer; give a shorter one"
            )
        if start and not self.told:
            self.note(
                f"the conversation has outgrown the model's context of {context:,} tokens: its oldest turns drop out"
            )
            self.told = True
        del self.turns[:start]
        return ids

    def _ids(self, messages: list[Message]) -> list[int]:
        if self.completes:
            return [self.tokenizer.end_of_text, *self.tokenizer.encode(messages[-1]["content"])]
        return conversation.encode(self.tokenizer, messages, generation_prompt=True)[0]
