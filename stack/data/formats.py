"""Conversations as other programs write them, made into lists of messages in this one place.

=============  ====================================================================================================
``messages``   a list of ``{"role", "content"}``, as OpenAI, TRL and most sets of the hub have it
``sharegpt``   ``conversations``: a list of ``{"from", "value"}``, or of texts, the user's and the assistant's in turn
``alpaca``     ``instruction``, ``input`` (or ``context``) and ``output``; ``history`` is a list of earlier pairs
``prompt``     ``prompt`` and ``completion``, each a text or a list of messages; ``question`` and ``answer`` likewise
=============  ====================================================================================================

The fields of a row tell its format. ``system`` and ``tools`` may stand beside each. Whether the messages are good, and
what of them is supervised, is said by :func:`stack.text.messages.check`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stack.config.schema import ConversationSource
from stack.core.errors import BadRow
from stack.text.messages import REASONING

MADE_OF = "document"  # the field of a conversation that names the document which it is made of
MESSAGES = "messages"
LISTS = {"messages": (MESSAGES,), "sharegpt": ("conversations", "conversation")}
QUESTIONS = {"alpaca": ("instruction",), "prompt": ("prompt", "question", "query", "input")}
ANSWERS = ("output", "completion", "response", "answer")
INPUTS, HISTORY, SYSTEM, TOOLS = ("input", "context"), "history", ("system", "system_prompt"), ("tools", "functions")
COLUMNS_OF_REASONING = REASONING[:2]  # beside the messages, where ``reasoning`` is often a switch: on or off
# Rows in which one of these says something are refused: their answers speak of what no prompt would show.
NOT_SHOWN = ("image", "images", "video", "videos", "audio", "audios", "documents")
PREFERENCE, PREFERRED = ("chosen", "rejected"), "preference data (chosen and rejected)"
LABEL, SETTINGS = "label", "chat_template_kwargs"
# What others call the roles; one in CALLS has calls as JSON in the place of a text.
ROLE_OF = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
ROLE_OF |= dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool")
CALLS = ("function_call", "tool_call")
OF_A_MESSAGE = ("role", "content", "weight", "tool_calls", "tools", *REASONING)
# Every field that is looked at. Of tables no other column is read.
FIELDS = {
    *(name for names in (*LISTS.values(), *QUESTIONS.values()) for name in names),
    *(*ANSWERS, *INPUTS, HISTORY, *SYSTEM, *TOOLS, *COLUMNS_OF_REASONING, *NOT_SHOWN, *PREFERENCE, LABEL, SETTINGS),
    MADE_OF,
}
KNOWN = (
    "messages (a list of role and content), conversations (a list of from and value), "
    "instruction and output, prompt and completion"
)


def messages_of(record: Mapping[str, Any], source: ConversationSource) -> tuple[Any, Counter[str]]:
    """The messages of a record, unchecked, and how often something of it is passed over, by name.

    Names are those of fields, ``messages[].NAME`` for an unknown one of a message, and that of the field for reasoning
    that ``source.reasoning`` drops, once a turn. BadRow with the reason where no format is found, or where a field says
    what cannot be learned from here.
    """
    given = {name: value for name, value in record.items() if value is not None and value not in ("", [], {})}
    used = {MADE_OF}
    messages = _listed(record, source, used)
    if messages is None:
        messages = _paired(given, source, used)
    if messages is None:
        raise _unknown(record, given, source)
    _refuse(given, used)
    if not isinstance(messages, list):
        return messages, Counter()
    messages = [_message(item) for item in messages]
    if source.reasoning == "keep":
        messages = _with_reasoning(messages, given, used)
    messages = _with_system(messages, given, used)
    passed_over = Counter(name for name in given if name not in used)
    for message in messages:
        if isinstance(message, dict):
            dropped = REASONING if source.reasoning == "drop" else ()
            passed_over.update(name for name in dropped if message.pop(name, None))
            passed_over.update(f"messages[].{name}" for name in message if message[name] and name not in OF_A_MESSAGE)
    return messages, passed_over


def _lists(source: ConversationSource) -> tuple[str, ...]:
    """The fields that a list of messages is looked for in; the one alone that a person has named."""
    if source.format in QUESTIONS:
        return ()
    if source.text != MESSAGES:
        return (source.text,)
    kinds = LISTS if source.format == "auto" else (source.format,)
    return tuple(name for kind in kinds for name in LISTS[kind])


def _listed(record: Mapping[str, Any], source: ConversationSource, used: set[str]) -> Any:
    """The list of messages of a record; what stands in its place where that is no list; None where nothing does."""
    name = next((name for name in _lists(source) if record.get(name) is not None), None)
    if name is None:
        return None
    used.add(name)
    found = _parsed(record[name])
    if found and isinstance(found, list) and all(isinstance(item, str) for item in found):
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(found)]
    return found


def _paired(given: dict[str, Any], source: ConversationSource, used: set[str]) -> list[Any] | None:
    """The messages of a question and its answer, with what stands beside them; None where there is no such pair."""
    every = source.format == "auto" and source.text == MESSAGES
    kinds = [*QUESTIONS] if every else [kind for kind in QUESTIONS if kind == source.format]
    asked = next((name for kind in kinds for name in QUESTIONS[kind] if name in given), None)
    answered = next((name for name in ANSWERS if name in given), None)
    if asked is None or answered is None:
        return None
    used |= {asked, answered}
    question, answer = given[asked], given[answered]
    extra = next((name for name in INPUTS if name in given and name != asked), None)
    if extra is not None and isinstance(question, str) and isinstance(given[extra], str):
        used.add(extra)
        question = f"{question}\n{given[extra]}"
    before = _history(given.get(HISTORY), used)
    if isinstance(question, list):  # its answers are read and not supervised, as in TRL
        before += [{"weight": 0} | item if isinstance(item, dict) else item for item in question]
    else:
        before.append({"role": "user", "content": question})
    return before + (answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])


def _history(value: Any, used: set[str]) -> list[Any]:
    pairs = _parsed(value or [])
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRow("history not a list of pairs")
    used.add(HISTORY)
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _unknown(record: Mapping[str, Any], given: dict[str, Any], source: ConversationSource) -> BadRow:
    lists = _lists(source)
    if given.keys() >= set(PREFERENCE):
        return BadRow(PREFERRED)
    if any(name in record for name in lists):
        return BadRow("null")
    if lists:
        return BadRow(f"no {lists[0]} field")
    return BadRow(f"no {QUESTIONS[source.format][0]} field with an answer ({', '.join(ANSWERS)})")


def _refuse(given: dict[str, Any], used: set[str]) -> None:
    """BadRow where a field says that an answer is not to be learned, or not from these messages alone."""
    shown = next((name for name in NOT_SHOWN if name in given), None)
    if shown is not None:
        raise BadRow(f"{shown}, which no prompt would show")
    if given.get(LABEL) is False:
        raise BadRow("label false: an answer that is not wanted")
    used |= {LABEL} if given.get(LABEL) is True else set()
    settings = given.get(SETTINGS)
    if isinstance(settings, Mapping) and any(name.endswith("tools") and value for name, value in settings.items()):
        raise BadRow(f"tools in {SETTINGS}, which no prompt would show")


def _message(item: Any) -> Any:
    """A message with OpenAI's names for keys and roles."""
    if not isinstance(item, Mapping):
        return item
    message = dict(item)
    for key, other in (("role", "from"), ("content", "value")):
        if message.get(key) is None and other in message:
            message[key] = message.pop(other)
    role = message.get("role")
    if role in CALLS:
        calls = _parsed(message["content"])
        if not isinstance(calls, list | dict):
            raise BadRow(f"{role} that is not JSON")
        message |= {"role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif isinstance(role, str):
        message["role"] = ROLE_OF.get(role, role)
    if call := message.pop("function_call", None):  # as OpenAI had it before tool_calls
        message["tool_calls"] = [call]
    return message


def _with_reasoning(messages: list[Any], given: dict[str, Any], used: set[str]) -> list[Any]:
    """The messages with the reasoning that stands beside them in the one answer that it can belong to."""
    name = next((name for name in COLUMNS_OF_REASONING if name in given), None)
    if name is None:
        return messages
    used.add(name)
    answers = [message for message in messages if isinstance(message, dict) and message.get("role") == "assistant"]
    if len(answers) != 1:
        raise BadRow(f"{name} beside {len(answers)} answers")
    return [{REASONING[0]: given[name]} | message if message is answers[0] else message for message in messages]


def _with_system(messages: list[Any], given: dict[str, Any], used: set[str]) -> list[Any]:
    """The messages with the system text and the tools that stand beside them in their first turn."""
    names = [next((name for name in some if name in given), None) for some in (SYSTEM, TOOLS)]
    used |= {name for name in names if name is not None}
    system, tools = (given.get(name) for name in names)
    if isinstance(tools, str) and tools.strip() in ("", "[]", "{}", "null"):  # none, as JSON
        tools = None
    if system is None and tools is None:
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    elif system not in (None, first.get("content")):
        raise BadRow("two system turns")
    return messages if tools is None else [{**messages[0], "tools": tools}, *messages[1:]]


def _parsed(value: Any) -> Any:
    """What a text holds as JSON, where that is a list or an object; the hub stores nested lists so."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list | dict) else value
