"""Messages of a conversation: what a good one is, and its one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from stack.core.errors import BadRow

ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message, in the order of transformers


class Call(TypedDict):
    """A tool that the assistant calls."""

    name: str
    arguments: dict[str, Any] | str  # a string is JSON already


class Message(TypedDict):
    """A message in its one form, as :func:`check` returns it: no value is null."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str  # empty only beside tool_calls or tools
    tools: NotRequired[list[dict[str, Any]]]  # of the first turn, a system turn: functions as OpenAI has them
    reasoning_content: NotRequired[str]  # of an assistant
    tool_calls: NotRequired[list[Call]]  # of an assistant, at least one
    weight: NotRequired[int]  # 0 in an assistant's turn that is not learned; otherwise absent


def check(value: Any) -> list[Message]:
    """The messages of a record in one form; BadRow with the reason where they are no conversation to learn from.

    Tool calls come as OpenAI has them (``{"type": "function", "function": {"name", "arguments"}}``) or bare
    (``{"name", "arguments"}``), and so do the ``tools`` of a system turn, which may also be JSON; content is a text or
    a list of text parts; a null is as good as no key. The role ``developer`` is ``system``. Keys that ChatML has no
    place for (``id``, ``name``, ``tool_call_id`` …) are passed over.
    """
    if not isinstance(value, list):
        raise BadRow("null" if value is None else "not a list of messages")
    messages = [_message(item) for item in value]
    _check_order(messages)
    try:
        canonical(messages)
    except UnicodeEncodeError:
        raise BadRow("lone surrogate") from None
    except (TypeError, ValueError, RecursionError):
        raise BadRow("tool call whose arguments are not JSON") from None
    return messages


def canonical(messages: list[Message]) -> bytes:
    """The conversation as JSON in UTF-8, the same for equal conversations: what its SHA-256 and its size are of."""
    return json.dumps(messages, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _check_order(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    if sum(message["role"] == "system" and bool(message["content"]) for message in messages) > 1:
        raise BadRow("two system turns")
    if any("tools" in message for message in messages[1:]):
        raise BadRow("tools not in the first turn")
    supervised = [is_supervised(message) for message in messages]
    if not any(supervised):
        raise BadRow("no supervised turn" if "assistant" in roles else "no assistant turn")
    # An assistant may greet first, and its greeting is learned like any other turn; but something has to be answered.
    if not any(supervised[roles.index("user") if "user" in roles else len(roles) :]):
        raise BadRow("assistant first")
    open_calls = 0
    for message in messages:
        if message["role"] != "tool":
            open_calls = len(message.get("tool_calls", ()))
        elif open_calls == 0:
            raise BadRow("tool without call")
        else:
            open_calls -= 1


def _message(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise BadRow("message not an object")
    role, weight = item.get("role"), item.get("weight")
    if role is None:
        raise BadRow("role missing")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise BadRow("unknown role")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise BadRow("weight not 0 or 1")
    calls, tools = _calls(item.get("tool_calls"), role), _tools(item.get("tools"), role)
    message = Message(role=role, content=_content(item.get("content"), empty=bool(calls or tools)))
    if tools:
        message["tools"] = tools
    reasoning = next((item[key] for key in REASONING if item.get(key)), None)
    if role == "assistant" and reasoning is not None:
        if not isinstance(reasoning, str):
            raise BadRow("reasoning not a string")
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and weight == 0:
        message["weight"] = 0
    return message


def _content(value: Any, empty: bool) -> str:
    """The text of a message; ``empty``: it may have none."""
    if value is None and not empty:
        raise BadRow("content null")
    if isinstance(value, list):
        value = "".join(map(_part, value))
    if not isinstance(value, str | None):
        raise BadRow("content not a string")
    if not value and not empty:
        raise BadRow("empty content")
    return value or ""


def _part(value: Any) -> str:
    if not isinstance(value, Mapping) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        raise BadRow("content with a part that is no text")
    return value["text"]


def _tools(value: Any, role: str) -> list[dict[str, Any]]:
    """Functions that can be called, as OpenAI has them."""
    if value is None or value == "":
        return []
    found = _parsed(value)
    if found == []:
        return []
    if role != "system":
        raise BadRow(f"tools of role {role}")
    if not isinstance(found, list):
        raise BadRow("tools not a list of functions")
    return [_tool(_parsed(item)) for item in found]


def _tool(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping) or item.get("type") not in (None, "function"):
        raise BadRow("tool that is no function")
    function = item if item.get("function") is None else item["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("tool without name")
    try:
        json.dumps(item, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadRow("tools not JSON") from None
    return dict(item) if function is not item else {"type": "function", "function": dict(item)}


def _calls(value: Any, role: str) -> list[Call]:
    if value is None or value == []:
        return []
    if role != "assistant":
        raise BadRow(f"tool call of role {role}")
    if not isinstance(value, list):
        raise BadRow("tool_calls not a list")
    return [_call(item) for item in value]


def _call(item: Any) -> Call:
    if not isinstance(item, Mapping) or item.get("type") not in (None, "function"):
        raise BadRow("tool call not a function")
    function = item if item.get("function") is None else item["function"]
    if not isinstance(function, Mapping):
        raise BadRow("tool call not a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise BadRow("tool call without name")
    if arguments is None:
        raise BadRow("tool call without arguments")
    if not isinstance(_parsed(arguments), dict):
        raise BadRow("tool call whose arguments are not a JSON object")
    return Call(name=name, arguments=arguments)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, parse_constant=int)  # int("NaN") is the error that JSON makes of it
    except (ValueError, RecursionError):
        return None


def is_supervised(message: Message) -> bool:
    """Whether the message is an assistant's turn that is learned."""
    return message["role"] == "assistant" and message.get("weight", 1) == 1
