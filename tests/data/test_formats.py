"""stack.data.formats: one conversation is one, however it is written; what means something is used, refused or told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import talk
from hydra import compose, initialize_config_dir
from tiny import sft_settings

from stack.config import schema as config
from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import ConversationSource, FineTune
from stack.core.errors import UserError
from stack.data import packing
from stack.data.packed import Packed
from stack.data.sources import Document, documents, fingerprint
from stack.text import conversation
from stack.text.messages import REASONING
from stack.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    return talk.tokenizer_in(tmp_path_factory.mktemp("words"))


def read(path: Path, rows: list[dict], **settings: Any) -> list[Document]:
    """The documents of a file of rows, a table if its name says so."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ConversationSource(files=(str(path),), **settings)
    return list(documents("own", source, on_bad_row="error", bad=Counter()))


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in pairs]


def from_value(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


ONE = turns(("user", "the sea?"), ("assistant", "yes"))
SYSTEM = [{"role": "system", "content": "s"}, *ONE]
TWO = [*ONE, *turns(("user", "and?"), ("assistant", "no"))]
LAST = [ONE[0], ONE[1] | {"weight": 0}, *TWO[2:]]  # only the last answer is learnt
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "f", "arguments": {"a": "b"}}
CALLED = [
    {"role": "system", "content": "", "tools": [TOOL]},
    ONE[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    *turns(("tool", "r"), ("assistant", "yes")),
]
IN_SHAREGPT = from_value(
    ("human", "the sea?"), ("function_call", json.dumps(CALL)), ("observation", "r"), ("gpt", "yes")
)
PARTS = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in ONE]

# What a conversation is written as, by what it is.
SAME = {
    "one": (
        ONE,
        [
            {"messages": ONE},
            {"messages": json.dumps(ONE)},
            {"messages": ONE, "tools": "[]"},
            {"messages": ONE, "tools": [], "functions": "null", "system": ""},
            {"messages": PARTS},
            {"conversations": ONE},
            {"conversation": ONE},
            {"conversations": from_value(("human", "the sea?"), ("gpt", "yes"))},
            {"conversations": from_value(("user", "the sea?"), ("assistant", "yes"))},
            {"messages": from_value(("user", "the sea?"), ("model", "yes"))},
            {"conversations": ["the sea?", "yes"]},
            {"instruction": "the sea?", "input": "", "output": "yes"},
            {"instruction": "the sea?", "response": "yes", "history": []},
            {"prompt": "the sea?", "completion": "yes"},
            {"prompt": "the sea?", "response": "yes"},
            {"question": "the sea?", "answer": "yes"},
            {"query": "the sea?", "response": "yes"},
            {"input": "the sea?", "output": "yes"},
            {"prompt": ONE[:1], "completion": ONE[1:]},
            {"prompt": ONE[:1], "completion": "yes"},
            {"prompt": "the sea?", "completion": ONE[1:], "label": True},
        ],
    ),
    "system": (
        SYSTEM,
        [
            {"messages": SYSTEM},
            {"messages": [SYSTEM[0] | {"role": "developer"}, *ONE]},
            {"messages": ONE, "system": "s"},
            {"messages": SYSTEM, "system": "s"},
            {"conversations": from_value(("system", "s"), ("human", "the sea?"), ("gpt", "yes"))},
            {"system": "s", "conversations": from_value(("human", "the sea?"), ("gpt", "yes"))},
            {"system": "s", "instruction": "the sea?", "output": "yes"},
            {"system_prompt": "s", "question": "the sea?", "response": "yes"},
            {"prompt": SYSTEM[:2], "completion": ONE[1:]},
        ],
    ),
    "two": (
        TWO,
        [
            {"messages": TWO},
            {"conversations": from_value(("human", "the sea?"), ("gpt", "yes"), ("human", "and?"), ("gpt", "no"))},
            {"history": [["the sea?", "yes"]], "instruction": "and?", "output": "no"},
            {"prompt": [ONE[0], ONE[1] | {"weight": 1}, TWO[2]], "completion": TWO[3:]},
        ],
    ),
    "last": (LAST, [{"messages": LAST}, {"prompt": TWO[:3], "completion": TWO[3:]}]),
    "input": (
        turns(("user", "do it\nwith this"), ("assistant", "yes")),
        [
            {"instruction": "do it", "input": "with this", "output": "yes"},
            {"instruction": "do it", "context": "with this", "response": "yes"},
        ],
    ),
    "tools": (
        CALLED,
        [
            {"messages": CALLED},
            {"messages": CALLED[1:], "tools": [TOOL]},
            {"messages": CALLED[1:], "tools": json.dumps([TOOL])},
            {"messages": CALLED[1:], "tools": [json.dumps(TOOL)]},
            {"messages": CALLED[1:], "functions": [FUNCTION]},
            {"conversations": IN_SHAREGPT, "tools": json.dumps([FUNCTION])},
            {
                "functions": [FUNCTION],
                "messages": [
                    CALLED[1],
                    {"role": "assistant", "content": None, "function_call": CALL},
                    {"role": "function", "name": "f", "content": "r"},
                    CALLED[4],
                ],
            },
            {"prompt": CALLED[1:2], "completion": CALLED[2:], "tools": [TOOL]},
        ],
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_conversation_in_all_formats_is_the_same(tmp_path, words, kind) -> None:
    """The same content and digest, so the same ids and masks, and packed twice it is twice the same document."""
    expected, rows = SAME[kind]
    found = read(tmp_path / "rows.jsonl", rows)
    assert [document.content for document in found] == [expected] * len(rows)
    assert {(d.digest, d.key, d.num_bytes) for d in found} == {(found[0].digest, found[0].key, found[0].num_bytes)}
    learnt = conversation.encode_batch(words, [document.content for document in found])
    assert all(some == learnt[0] for some in learnt) and sum(learnt[0][1]) > 0
    for number, row in enumerate(rows):
        (table,) = read(tmp_path / f"{number}.parquet", [row])
        assert table.content == expected and table.digest == found[0].digest


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_of_the_hub_is_read_by_its_columns(tmp_path, monkeypatch, streaming) -> None:
    """Of other columns the names alone are read; a set without any known column is told."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    talks = [
        {"id": n, "conversations": from_value(("human", f"{n}?"), ("gpt", "yes")), "tools": "[]"} for n in range(3)
    ]
    source = ConversationSource(hub=config.Hub(path=str(tmp_path / "set"), streaming=streaming))
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(talks), tmp_path / "set/train.parquet")
    found = list(documents("own", source, on_bad_row="error", bad=Counter()))
    assert [document.content[0]["content"] for document in found] == ["0?", "1?", "2?"]
    assert found[0].passed_over == {"id": 1}
    pq.write_table(pa.Table.from_pylist([{"a": "b", "c": "d"}]), tmp_path / "set/train.parquet")
    with pytest.raises(UserError, match=r"no field 'messages'; there are \['a', 'c'\]"):
        list(documents("own", source, on_bad_row="skip", bad=Counter()))


def test_a_format_can_be_asked_for(tmp_path) -> None:
    both = {
        "messages": ONE,
        "prompt": "p",
        "completion": "c",
        "conversations": from_value(("human", "h"), ("gpt", "g")),
    }
    answers = {
        kind: read(tmp_path / "a.jsonl", [both], format=kind)[0].content[-1]["content"]
        for kind in ("auto", "messages", "sharegpt", "prompt")
    }
    assert answers == {"auto": "yes", "messages": "yes", "sharegpt": "g", "prompt": "c"}
    assert read(tmp_path / "a.jsonl", [{"chosen": ONE}], text="chosen")[0].content == ONE
    for settings, said in (
        ({"format": "alpaca"}, "no instruction field with an answer"),
        ({"text": "talk"}, "no talk"),
    ):
        with pytest.raises(UserError, match=said):
            read(tmp_path / "a.jsonl", [both], **settings)
    prints = [
        fingerprint(ConversationSource(files=(f"{tmp_path}/a.jsonl",), format=kind)) for kind in ("auto", "prompt")
    ]
    assert prints[0] != prints[1]


REFUSED = [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference data (chosen and rejected)"),
    ({"prompt": "a", "completion": "b", "label": False}, "label false: an answer that is not wanted"),
    ({"messages": ONE, "images": ["a.png"]}, "images, which no prompt would show"),
    ({"messages": ONE, "documents": [{"text": "a"}]}, "documents, which no prompt would show"),
    (
        {"messages": ONE, "chat_template_kwargs": {"xml_tools": ["{}"]}},
        "tools in chat_template_kwargs, which no prompt",
    ),
    ({"messages": ONE, "tools": "f(x)"}, "tools not a list of functions"),
    ({"messages": ONE, "tools": [{"description": "a"}]}, "tool without name"),
    ({"messages": SYSTEM, "system": "other"}, "two system turns"),
    ({"messages": ONE, "system": 3}, "content not a string"),
    ({"conversations": from_value(("human", "a"), ("function_call", "f(x)"))}, "function_call that is not JSON"),
    ({"conversations": from_value(("alien", "a"), ("gpt", "b"))}, "unknown role"),
    ({"conversations": [{"value": "a"}]}, "role missing"),
    ({"instruction": "a", "output": ""}, "no messages field"),
    ({"instruction": "a", "output": 3}, "content not a string"),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "history not a list of pairs"),
    ({"prompt": ONE[:1], "completion": [{"role": "user", "content": "a"}]}, "no assistant turn"),
    ({"messages": [], "conversations": None}, "no assistant turn"),
    ({"messages": None, "conversations": None}, "null"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_learnt_from_is_refused(tmp_path, row, reason) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.jsonl", [row])
    assert f"a.jsonl, line 1: {reason}" in str(error.value)


THOUGHT = [ONE[0], ONE[1] | {"reasoning_content": "hm"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_not_used_is_counted_by_name(tmp_path, suffix) -> None:
    named = [ONE[0] | {"name": "n"}, ONE[1] | {"id": 3}]
    row = {"id": 1, "messages": named, "prompt": "p", "tools": None, "images": [], "source": "web", "reasoning": "on"}
    (found,) = read(tmp_path / f"a.{suffix}", [row])
    assert found.content == ONE
    assert found.passed_over == dict.fromkeys(
        ("id", "prompt", "source", "reasoning", "messages[].name", "messages[].id"), 1
    )


@pytest.mark.parametrize(
    "row",
    [
        *({"messages": [ONE[0], ONE[1] | {key: "hm"}]} for key in REASONING),
        {"messages": ONE, "reasoning_content": "hm"},
        {"prompt": "the sea?", "completion": "yes", "thinking": "hm"},
    ],
)
def test_reasoning_is_kept_or_dropped_and_counted(tmp_path, row) -> None:
    (dropped,) = read(tmp_path / "a.jsonl", [row])
    (kept,) = read(tmp_path / "a.jsonl", [row], reasoning="keep")
    assert dropped.content == ONE and sum(dropped.passed_over.values()) == 1
    assert kept.content == THOUGHT and not kept.passed_over
    with pytest.raises(UserError, match="reasoning_content beside 2 answers"):
        read(tmp_path / "a.jsonl", [{"messages": TWO, "reasoning_content": "hm"}], reasoning="keep")


# ---------------------------------------------------------------- packing


def packed(root: Path, words: Tokenizer, rows: list[Any], *more: str) -> tuple[Packed, list[str]]:
    """The rows packed as ``chat.files``, and what was shown."""
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with initialize_config_dir(CONF, version_base="1.3"):
        settings = sft_settings(root, f"chat.files=[{root}/rows.jsonl]", *more)
        chat = typed(compose("sft", overrides=settings), FineTune).chat
    shown: list[str] = []
    return packing.pack(chat, words, root, shown.append, window=200), shown


def test_packing_shows_one_conversation_and_tells_what_is_not_used(tmp_path, words) -> None:
    rows = [
        {"id": n, "conversations": from_value(("human", f"{n}?"), ("gpt", "yes"), ("human", "b"))} for n in range(30)
    ]
    rows[3]["conversations"][1]["thinking"] = "hm"
    result, shown = packed(tmp_path, words, [{"messages": None}, *rows])
    text = "\n".join(shown)
    assert text.count("its first conversation") == 1 and "not used are id (1)." in text
    assert "‹<|im_start|>›user\n0?‹<|im_end|>›\n‹<|im_start|>›assistant\n⟦yes‹<|im_end|>›⟧" in text
    last = "1 bad rows; not used are id (30), thinking (1); chat.reasoning=keep learns reasoning; 1 × null)"
    assert shown[-1].endswith(last)
    assert result.manifest["sources"]["files"]["skipped"]["passed_over"] == {"id": 30, "thinking": 1}
    kept, shown = packed(tmp_path, words, rows, "chat.reasoning=keep")
    assert kept.folder != result.folder and "not used are id (30)" in "\n".join(shown)
    assert kept.manifest["splits"]["train"]["tokens"] + kept.manifest["splits"]["validation"]["tokens"] > sum(
        split["tokens"] for split in result.manifest["splits"].values()
    )


def test_a_file_of_bad_rows_alone_is_told_with_its_fields_and_the_formats(tmp_path, words) -> None:
    rows = [{"messages": None}, *({"title": "a", "body": "b"} for _ in range(59))]
    with pytest.raises(UserError) as error:
        packed(tmp_path, words, rows)
    for part in (
        "source files: all 60 rows are bad, 59 of them for: no messages field",
        f"{tmp_path}/rows.jsonl, line 2, with the fields title, body",
        "conversations (a list of from and value)",
        "chat.text=",
    ):
        assert part in str(error.value)
    assert "chat.validation" not in str(error.value)
    preferred = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 9
    with pytest.raises(UserError, match=r"all 9 rows are bad, 9 of them for: preference data.*chat\.text=chosen"):
        packed(tmp_path, words, preferred)
