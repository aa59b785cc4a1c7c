"""Held-out conversations answered and judged: does the model stop by itself, is the answer right, is its form.

Every supervised assistant turn, but a greeting, is a question of its own, with the true turns before it. A
conversation is right when all of its turns are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack.config.schema import Conversations, ConversationSource, FineTune
from stack.core.errors import UserError
from stack.core.files import read_json, write_json
from stack.core.ranks import ALONE, Ranks
from stack.data.holding_out import rule_of
from stack.data.sources import documents
from stack.evaluation.generate import generate
from stack.model.decoder import Decoder
from stack.text import conversation
from stack.text.tokenizer import Tokenizer

KEPT = "questions.json"  # in the run's folder
BATCH = 128  # questions answered at a time; of similar length, so that little is padding


@dataclass(frozen=True)
class Question:
    """One assistant turn to be made by the model."""

    source: str
    conversation: int  # its number among the source's
    prompt: tuple[int, ...]  # everything before the turn, up to and with ``<|im_start|>assistant``
    text: str  # of the last message before it
    reference: str  # the true turn, tool calls included

    @classmethod
    def of(cls, values: dict[str, Any]) -> Question:
        """From its values as JSON has them."""
        return cls(**{**values, "prompt": tuple(values["prompt"])})


@dataclass(frozen=True)
class Answer:
    """What the model made of a question."""

    question: Question
    text: str  # without what stopped it
    stopped: bool  # by the end of the turn, not by the limit


def of_run(
    folder: Path, c: FineTune, tokenizer: Tokenizer, context: int, show: Callable[[str], None], *, kept: bool
) -> list[dict[str, Any]]:
    """The questions of the run in ``folder`` as JSON values; ``kept``: those that lie there from its beginning on.

    So a run whose conversations are gone or changed is asked the same ones to its end. Where they can be read neither
    there nor here, a line says that nothing is asked.
    """
    each, path = c.sft.answers, folder / KEPT
    if not each:
        return []
    if kept and path.is_file() and (found := read_json(path))["each"] == each:
        return found["questions"]
    try:
        asked = [asdict(question) for question in questions(c.chat, tokenizer, each, context)]
    except UserError as error:
        show(f"no held-out conversation is answered: {error}")
        return []
    write_json(path, {"each": each, "questions": asked})
    return asked


def questions(chat: Conversations, tokenizer: Tokenizer, each: int, context: int) -> list[Question]:
    """The turns of the first ``each`` held-out conversations of every source that fit into ``context``, in order."""
    found = []
    rule = rule_of(chat)
    for name, source in sorted(chat.resolved_sources().items()):
        taken = 0
        for document in documents(name, source, on_bad_row=chat.on_bad_row, bad=Counter()):
            if taken >= each:
                break
            ((_, held_out),) = rule.parts(source, document)  # a conversation is never cut
            if held_out:
                found += _turns(name, taken, document.content, tokenizer, context)
                taken += 1
    return found


def _turns(source: str, number: int, messages: list, tokenizer: Tokenizer, context: int) -> list[Question]:
    turns, asked = [], False
    for place, message in enumerate(messages):
        asked = asked or message["role"] == "user"
        if message["role"] != "assistant" or message.get("weight") == 0 or not asked:  # a greeting answers nothing
            continue
        prompt, _ = conversation.encode(tokenizer, messages[:place], generation_prompt=True)
        ids, supervised = conversation.encode(tokenizer, messages[: place + 1])
        turn = [i for i, own in zip(ids[len(prompt) :], supervised[len(prompt) :], strict=True) if own]
        if len(prompt) + len(turn) <= context:
            before = messages[place - 1]["content"] or ""
            turns.append(Question(source, number, tuple(prompt), before, tokenizer.decode(turn[:-1])))
    return turns


def answer(model: Decoder, tokenizer: Tokenizer, asked: list[Question], tokens: int) -> list[Answer]:
    """The likeliest answer to each question, in the order of the questions."""
    found: dict[int, Answer] = {}
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        prompts = [asked[i].prompt for i in some]
        made = generate(model, prompts, tokens=tokens, stops=tokenizer.stops, banned=tokenizer.unsampled)
        for i, ids in zip(some, made, strict=True):
            stopped = bool(ids) and ids[-1] == tokenizer.end_of_turn
            ended = bool(ids) and ids[-1] in tokenizer.stops
            found[i] = Answer(asked[i], tokenizer.decode(ids[:-1] if ended else ids), stopped)
    return [found[i] for i in range(len(asked))]


def in_form(text: str, headings: tuple[str, ...]) -> bool:
    """Whether every heading is a line of the text (or begins one), in order."""
    at = 0
    lines = text.splitlines()
    for heading in headings:
        place = next((i for i in range(at, len(lines)) if lines[i].startswith(heading)), None)
        if place is None:
            return False
        at = place + 1
    return True


def judge(
    answers: list[Answer], sources: dict[str, ConversationSource], ranks: Ranks = ALONE
) -> dict[str, dict[str, float]]:
    """By source: ``stopped``, ``exact`` where the source is checked for it, ``form`` where it has headings; shares."""
    table = {}
    for name, source in sorted(sources.items()):
        own = [a for a in answers if a.question.source == name]
        checks = {"stopped": {}}
        checks |= {"exact": {}} if source.check == "exact" else {}
        checks |= {"form": {}} if source.headings else {}
        for a in own:
            held = {
                "stopped": a.stopped,
                "exact": a.stopped and a.text == a.question.reference,
                "form": a.stopped and in_form(a.text, source.headings),
            }
            for check, conversations in checks.items():
                number = a.question.conversation
                conversations[number] = conversations.get(number, True) and held[check]
        sums = ranks.sum(len(checks["stopped"]), *(sum(c.values()) for c in checks.values()))
        if sums[0]:
            table[name] = {check: right / sums[0] for check, right in zip(checks, sums[1:], strict=True)}
    return table


def lines(table: dict[str, dict[str, float]]) -> list[str]:
    """The table for people."""
    checks = ("stopped", "exact", "form")
    rows = [f"  {'held-out answers':<18}" + "".join(f"{check:>9}" for check in checks)]
    for source, found in table.items():
        rows.append(f"  {source:<18}" + "".join(f"{found[c]:>9.1%}" if c in found else f"{'':>9}" for c in checks))
    return rows


def shard(asked: list[Question], ranks: Ranks) -> list[Question]:
    """This rank's questions: whole conversations, by turns among ranks."""
    if ranks.world == 1:
        return asked
    numbers = {key: i for i, key in enumerate(dict.fromkeys((q.source, q.conversation) for q in asked))}
    mine = np.arange(len(numbers)) % ranks.world == ranks.rank
    return [q for q in asked if mine[numbers[q.source, q.conversation]]]
