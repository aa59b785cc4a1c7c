"""Conversations: their text, and their ids with what of them is supervised.

A conversation is ``<|endoftext|>`` and, for every message, ``<|im_start|>ROLE``, a line feed, the content,
``<|im_end|>`` and a line feed (ChatML); tools stand in the system turn as Qwen writes them. Ids are made segment by
segment: a control token comes from structure alone, text is encoded as the characters it is, and no token spans the
border of what is supervised and what is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.text import Text

from stack.core.errors import UserError
from stack.text.messages import Call, Message, is_supervised
from stack.text.template import CALL, END_OF_CALL, END_OF_RESPONSE, HOW_TO_CALL, RESPONSE, TOOLS
from stack.text.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN, Tokenizer


class Segment(NamedTuple):
    """A piece of a conversation: one control token, or text that is encoded by itself."""

    text: str
    control: bool
    supervised: bool


def segments(messages: Iterable[Message], generation_prompt: bool = False) -> Iterator[Segment]:
    """The pieces of a conversation in order, without the ``<|endoftext|>`` in front.

    Supervised are an assistant's reasoning, its content, its tool calls and its ``<|im_end|>``. ``generation_prompt``
    adds the beginning of an assistant's turn.
    """
    for message in messages:
        supervised = is_supervised(message)
        yield from (Segment(START_OF_TURN, True, False), Segment(f"{message['role']}\n", False, False))
        if message["role"] == "tool":
            yield Segment(RESPONSE, True, False)
            yield Segment(f"\n{message['content']}\n", False, False)
            yield Segment(END_OF_RESPONSE, True, False)
        elif "tools" in message:
            yield from _signatures(message["content"], message["tools"])
        elif said := _thought(message) + message["content"]:
            yield Segment(said, False, supervised)
        for call in message.get("tool_calls", ()):
            yield Segment(CALL, True, supervised)
            yield Segment(_call_text(call), False, supervised)
            yield Segment(END_OF_CALL, True, supervised)
        yield from (Segment(END_OF_TURN, True, supervised), Segment("\n", False, False))
    if generation_prompt:
        yield from (Segment(START_OF_TURN, True, False), Segment("assistant\n", False, False))


def _thought(message: Message) -> str:
    return f"<think>\n{message['reasoning_content']}\n</think>\n\n" if "reasoning_content" in message else ""


def _signatures(content: str, tools: list[dict[str, Any]]) -> Iterator[Segment]:
    """A system turn with tools. Its text and the signatures are one piece, as they are for other programs."""
    before = f"{content}\n\n" if content else ""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    for text in (before + TOOLS + listed + HOW_TO_CALL[0], *HOW_TO_CALL[1:]):
        yield Segment(text, text in (CALL, END_OF_CALL), False)


def _call_text(call: Call) -> str:
    name, arguments = json.dumps(call["name"], ensure_ascii=False), call["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'\n{{"name": {name}, "arguments": {written}}}\n'


def render(messages: list[Message], generation_prompt: bool = False, *, bos: str = END_OF_TEXT) -> str:
    """The text of a conversation, equal to what transformers makes of :data:`stack.text.template.TEMPLATE`."""
    return bos + "".join(segment.text for segment in segments(messages, generation_prompt))


def encode(
    tokenizer: Tokenizer, messages: list[Message], generation_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, ``<|endoftext|>`` in front, and for each of them whether it is supervised."""
    return encode_batch(tokenizer, [messages], generation_prompt)[0]


def encode_batch(
    tokenizer: Tokenizer, conversations: Sequence[list[Message]], generation_prompt: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """:func:`encode` of many conversations, on all threads; UserError where the vocabulary lacks a control token."""
    pieces = [list(segments(messages, generation_prompt)) for messages in conversations]
    texts = iter(tokenizer.encode_batch([piece.text for some in pieces for piece in some if not piece.control]))
    found = []
    for some in pieces:
        ids, supervised = [tokenizer.end_of_text], [False]
        for piece in some:
            own = [_control(tokenizer, piece.text)] if piece.control else next(texts)
            ids += own
            supervised += [piece.supervised] * len(own)
        found.append((ids, supervised))
    return found


def _control(tokenizer: Tokenizer, text: str) -> int:
    if text not in tokenizer.control:
        raise UserError(
            f"a conversation needs the control token {text}, which the vocabulary of {tokenizer.folder} has not got "
            f"({tokenizer.vocab_size} tokens); have it added: python -m stack.sft with {text} among sft.tokens"
        )
    return tokenizer.control[text]


def fit(supervised: Sequence[bool], window: int) -> int | None:
    """How many ids of a conversation stay at most ``window``; None where no whole supervised turn fits.

    A longer conversation ends with the ``<|im_end|>`` of the last supervised turn that fits. The line feed behind it is
    never supervised, and neither is a turn of weight 0 after it: both would cost room and teach nothing.
    """
    if len(supervised) <= window:
        return len(supervised)
    ends = (i for i in range(window, 0, -1) if supervised[i - 1] and not supervised[i])
    return next(ends, None)


# ---------------------------------------------------------------- for people

SUPERVISED, CONTROL = "bold green", "magenta"
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey these


def coloured(tokenizer: Tokenizer, ids: Sequence[int], supervised: Sequence[bool], *, marks: bool = False) -> Text:
    """A conversation as people see it: what is supervised in a style of its own, control tokens in another.

    Args:
        tokenizer: of the ids.
        ids: whole segments.
        supervised: for each id whether it is supervised.
        marks: also put what is supervised between ⟦ and ⟧ and control tokens between ‹ and ›, for a console without
            colour (``console.no_color or console.color_system is None``).
    """
    shown, controls = Text(), set(tokenizer.control.values())
    for marked, span in groupby(zip(ids, map(bool, supervised), strict=True), key=lambda pair: pair[1]):
        style = SUPERVISED if marked else ""
        shown.append("⟦" if marks and marked else "", style)
        for control, some in groupby((int(i) for i, _ in span), key=controls.__contains__):
            for text in map(tokenizer.decode, ([i] for i in some) if control else [list(some)]):
                visible = _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
                visible = f"‹{visible}›" if marks and control else visible
                shown.append(visible, f"{style} {CONTROL}".strip() if control else style)
        shown.append("⟧" if marks and marked else "", style)
    return shown
