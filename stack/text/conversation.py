"""Conversations: which ones are good, their text, and their ids with what of them is learnt.

A conversation is ``<|endoftext|>`` and, for every message, ``<|im_start|>ROLE``, a line feed, the content,
``<|im_end|>`` and a line feed (ChatML); tools stand in the system turn as Qwen writes them. Ids are made segment by
segment: a control token comes from structure alone, text is encoded as the characters it is, and no token spans the
border of what is learnt and what is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from rich.text import Text

from stack.config.schema import UserError
from stack.data.sources import BadRow
from stack.text.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN, Tokenizer

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_OF_RESPONSE = "<tool_response>", "</tool_response>"
ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message, in the order of transformers

# What Qwen2.5 and Qwen3 write around the signatures of tools, in pieces: those that are control tokens in their
# templates are control tokens here.
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
HOW_TO_CALL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    CALL,
    END_OF_CALL,
    " XML tags:\n",
    CALL,
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    END_OF_CALL,
)

# What transformers renders with: chat_template of tokenizer_config.json. It says what `segments` says, and a test holds
# the two together. Nothing is stripped, and arguments that are a string already stand as they are, as in Qwen3's.
# Between the generation tags stands what is learnt. Renderers that do not know them remove them in this very spelling.
TEMPLATE = (
    r"""
{{- bos_token -}}
{%- macro said(text, message) -%}
  {%- set thought = message['reasoning_content'] or message['thinking'] or message['reasoning'] -%}
  {%- if thought -%}
    {{- '<think>\n' + thought + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- text -}}
  {%- for tool_call in message['tool_calls'] or [] -%}
    {%- set call = tool_call['function'] or tool_call -%}
    {{- '<tool_call>\n{"name": ' + call['name'] | tojson + ', "arguments": ' -}}
    {{- call['arguments'] if call['arguments'] is string else call['arguments'] | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>' -}}
{%- endmacro -%}
{%- set functions = tools or messages[0]['tools'] -%}
{%- macro signatures() -%}
  {{- TOOLS -}}
  {%- for tool in functions -%}
    {{- '\n' + (tool if tool['function'] else {'type': 'function', 'function': tool}) | tojson -}}
  {%- endfor -%}
  {{- HOW_TO_CALL -}}
{%- endmacro -%}
{%- set one = namespace(text='') -%}
{%- if functions and messages[0]['role'] not in ['system', 'developer'] -%}
  {{- '<|im_start|>system\n' + signatures() + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set one.text = '' -%}
  {%- if message['content'] is string -%}
    {%- set one.text = message['content'] -%}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] != 'text' -%}
        {{- raise_exception('this model reads text only, not content of type ' + part['type'] | string) -}}
      {%- endif -%}
      {%- set one.text = one.text + part['text'] -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_start|>' + ('system' if message['role'] == 'developer' else message['role']) + '\n' -}}
  {%- if message['role'] == 'assistant' and message['weight'] != 0 -%}
    {% generation %}{{- said(one.text, message) -}}{% endgeneration %}
  {%- elif message['role'] == 'assistant' -%}
    {{- said(one.text, message) -}}
  {%- elif message['role'] == 'tool' -%}
    {{- '<tool_response>\n' + one.text + '\n</tool_response><|im_end|>' -}}
  {%- elif functions and loop.first and message['role'] in ['system', 'developer'] -%}
    {{- one.text + ('\n\n' if one.text else '') + signatures() + '<|im_end|>' -}}
  {%- else -%}
    {{- one.text + '<|im_end|>' -}}
  {%- endif -%}
  {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
    .replace("HOW_TO_CALL", json.dumps("".join(HOW_TO_CALL)))
    .replace("TOOLS", json.dumps(TOOLS))
)


class Call(TypedDict):
    """A tool that the assistant calls."""

    name: str
    arguments: dict[str, Any] | str  # a string is JSON already


class Message(TypedDict):
    """A message as :func:`check` leaves it: nothing is null and nothing stands in two ways."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str  # empty only beside tool_calls or tools
    tools: NotRequired[list[dict[str, Any]]]  # of the first turn, a system turn: functions as OpenAI has them
    reasoning_content: NotRequired[str]  # of an assistant
    tool_calls: NotRequired[list[Call]]  # of an assistant, at least one
    weight: NotRequired[int]  # 0 in an assistant's turn that is not learnt; otherwise absent


# ---------------------------------------------------------------- good ones


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
    learnt = [_learnt(message) for message in messages]
    if not any(learnt):
        raise BadRow("no supervised turn" if "assistant" in roles else "no assistant turn")
    # An assistant may greet first, and its greeting is learnt like any other turn; but something has to be answered.
    if not any(learnt[roles.index("user") if "user" in roles else len(roles) :]):
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


def _learnt(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1


# ---------------------------------------------------------------- text and ids


class Segment(NamedTuple):
    """A piece of a conversation: one control token, or text that is encoded by itself."""

    text: str
    control: bool
    supervised: bool  # learnt


def segments(messages: Iterable[Message], generation_prompt: bool = False) -> Iterator[Segment]:
    """The pieces of a conversation in order, without the ``<|endoftext|>`` in front.

    Supervised are an assistant's reasoning, its content, its tool calls and its ``<|im_end|>``. ``generation_prompt``
    adds the beginning of an assistant's turn.
    """
    for message in messages:
        learnt = _learnt(message)
        yield from (Segment(START_OF_TURN, True, False), Segment(f"{message['role']}\n", False, False))
        if message["role"] == "tool":
            yield Segment(RESPONSE, True, False)
            yield Segment(f"\n{message['content']}\n", False, False)
            yield Segment(END_OF_RESPONSE, True, False)
        elif "tools" in message:
            yield from _signatures(message["content"], message["tools"])
        elif said := _thought(message) + message["content"]:
            yield Segment(said, False, learnt)
        for call in message.get("tool_calls", ()):
            yield Segment(CALL, True, learnt)
            yield Segment(_call_text(call), False, learnt)
            yield Segment(END_OF_CALL, True, learnt)
        yield from (Segment(END_OF_TURN, True, learnt), Segment("\n", False, False))
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
    """The text of a conversation, equal to what transformers makes of :data:`TEMPLATE`."""
    return bos + "".join(segment.text for segment in segments(messages, generation_prompt))


def encode(
    tokenizer: Tokenizer, messages: list[Message], generation_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, ``<|endoftext|>`` in front, and for each of them whether it is learnt."""
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
    """How many ids of a conversation stay at most ``window``; None where no whole assistant turn to learn fits.

    A longer conversation ends with the ``<|im_end|>`` of the last turn to learn that fits. The line feed behind it is
    never learnt, and neither is a turn of weight 0 after it: both would cost room and teach nothing.
    """
    if len(supervised) <= window:
        return len(supervised)
    ends = (i for i in range(window, 0, -1) if supervised[i - 1] and not supervised[i])
    return next(ends, None)


# ---------------------------------------------------------------- for people

SUPERVISED, CONTROL = "bold green", "magenta"
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey these


def coloured(tokenizer: Tokenizer, ids: Sequence[int], supervised: Sequence[bool], *, marks: bool = False) -> Text:
    """A conversation as people see it: what is learnt in a style of its own, control tokens in another.

    Args:
        tokenizer: of the ids.
        ids: whole segments.
        supervised: for each id whether it is learnt.
        marks: also put what is learnt between ⟦ and ⟧ and control tokens between ‹ and ›, for a console without
            colour (``console.no_color or console.color_system is None``).
    """
    shown, controls = Text(), set(tokenizer.control.values())
    for learnt, span in groupby(zip(ids, map(bool, supervised), strict=True), key=lambda pair: pair[1]):
        style = SUPERVISED if learnt else ""
        shown.append("⟦" if marks and learnt else "", style)
        for control, some in groupby((int(i) for i, _ in span), key=controls.__contains__):
            for text in map(tokenizer.decode, ([i] for i in some) if control else [list(some)]):
                visible = _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
                visible = f"‹{visible}›" if marks and control else visible
                shown.append(visible, f"{style} {CONTROL}".strip() if control else style)
        shown.append("⟧" if marks and learnt else "", style)
    return shown
