"""stack.data.sources: what is read is what was written, and nothing is dropped without being counted."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stack.config.schema import ConversationSource, Hub, Source
from stack.core.errors import UserError
from stack.data import lines
from stack.data.sources import Document, documents, expected_bytes, fingerprint, held_out, packs
from stack.text.messages import canonical

TEXTS = ["a\u2028b", "c\u0085d\x0b\x0c", "", "e\r\nf\rg", "<|endoftext|>\x00", "日本語 🙂"]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
# each bad row, and the reason under which it is counted
BAD = {
    b'{"text": "a"': "not JSON",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": NULL}': "not JSON",
    b"[" * 100_000: "not JSON",
    b'["text"]': "not an object",
    b"null": "not an object",
    b'{"TEXT": "a"}': "no text field",
    b'{"text": null}': "null",
    b'{"text": 3}': "not a string",
    b'{"text": ["a"]}': "not a string",
    b'{"text": "\\ud800"}': "lone surrogate",
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What `datasets` caches in these tests stays out of the person's own cache."""
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    patch.undo()


def read(*files: Path | str, **settings) -> list[Document]:
    source = Source(files=tuple(map(str, files)), **settings)
    bad: Counter[str] = Counter()
    found = list(documents("own", source, on_bad_row="error", bad=bad))
    assert not bad
    return found


def json_lines(texts: list[str], *, ascii_only: bool = False) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=ascii_only).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_jsonl_is_read_as_written(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](json_lines(TEXTS)))
    found = read(path)
    assert [d.text for d in found] == TEXTS
    assert [d.key for d in found] == [hashlib.sha256(t.encode()).digest() for t in TEXTS]
    assert [d.row for d in found] == list(range(len(TEXTS)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_txt_file_is_one_document(tmp_path, suffix):
    text = "\n\n".join(TEXTS) + "\n"
    path = tmp_path / f"t.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](text.encode()))
    assert [d.text for d in read(path)] == [text]


def test_parquet_is_read_as_written(tmp_path):
    pq.write_table(pa.table({"id": list(range(len(TEXTS))), "text": TEXTS}), tmp_path / "t.parquet", row_group_size=2)
    assert [d.text for d in read(tmp_path / "t.parquet")] == TEXTS


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_any_chunk_size(tmp_path, monkeypatch, texts, ascii_only, chunk):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    path = tmp_path / "t.jsonl"
    path.write_bytes(json_lines(texts, ascii_only=ascii_only))
    assert [d.text for d in read(path)] == texts


def test_records_end_at_lf_only(tmp_path):
    path = tmp_path / "t.jsonl"
    # a byte order mark, CR as white space inside a record, CR LF, a blank line, no LF at the end
    path.write_bytes(b'\xef\xbb\xbf{"text":\r"a"}\r\n\n{"text": "b\xe2\x80\xa8c"}')
    assert [(d.text, d.row) for d in read(path)] == [("a", 0), ("b\u2028c", 2)]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[:20].decode("latin-1"))
def test_a_bad_row_is_counted_or_an_error_with_file_and_line(tmp_path, row):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + row + b'\n{"text": "None"}\n')
    bad: Counter[str] = Counter()
    found = list(documents("own", Source(files=(str(path),)), on_bad_row="skip", bad=bad))
    assert [(d.text, d.row) for d in found] == [("a", 0), ("None", 2)]
    assert bad == {BAD[row]: 1}
    with pytest.raises(UserError) as error:
        read(path)
    for part in (f"{path}, line 2", BAD[row], "'text'", "data.on_bad_row=skip"):
        assert part in str(error.value)


def test_bad_rows_of_other_formats_are_counted(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"caf\xe9")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"text": pa.chunked_array([pa.array(["a", None, ""]), broken])}), tmp_path / "t.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    bad: Counter[str] = Counter()
    source = Source(files=(f"{tmp_path}/*",))
    assert [(d.text, d.row) for d in documents("own", source, on_bad_row="skip", bad=bad)] == [("a", 2), ("", 4)]
    assert bad == {"not UTF-8": 2, "null": 1, "not a string": 2}
    with pytest.raises(UserError, match=r"t\.parquet, row 2: null"):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize("max_mb", [None, 1e-5, 1.1e-5, 1.0])
def test_reading_can_start_at_any_row(tmp_path, max_mb):
    for part in range(3):
        rows = [b'{"text": "%d-%d"}' % (part, i) if i != 4 else b"bad" for i in range(7)]
        (tmp_path / f"{part}.jsonl").write_bytes(b"\n".join(rows))
    source = Source(files=(f"{tmp_path}/*.jsonl",), max_mb=max_mb)

    def run(start: int) -> tuple[list[Document], int]:
        bad: Counter[str] = Counter()
        return list(documents("own", source, on_bad_row="skip", start=start, bad=bad)), bad.total()

    everything, all_bad = run(0)
    sizes = [len(d.text) for d in everything]
    if max_mb is None or max_mb == 1.0:
        assert len(everything) == 18 and all_bad == 3
    else:  # the document that reaches the limit is the last one
        assert sum(sizes[:-1]) < max_mb * 1e6 <= sum(sizes)
    for start in range(22):
        found, bad = run(start)
        assert found == [d for d in everything if d.row >= start]
        assert bad == sum(row >= start for row in (4, 11, 18)[:all_bad])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["json", "parquet", "text"])
def test_a_data_set_folder_is_read_streamed_or_not(tmp_path, streaming, kind):
    texts = ["a\u2028b", "c", "", "e f"] if kind != "text" else ["a", "c", "", "e f"]
    if kind == "json":
        (tmp_path / "train.jsonl").write_bytes(json_lines(texts, ascii_only=True))
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts, "n": range(4)}), tmp_path / "train-00000-of-00001.parquet")
    else:
        (tmp_path / "train.txt").write_text("\n".join(texts))
    (tmp_path / "README.md").write_text("# a data set card\n")
    source = Source(hub=Hub(path=str(tmp_path), streaming=streaming))
    for start in (0, 2):
        found = list(documents("hub", source, on_bad_row="error", start=start, bad=Counter()))
        assert [(d.text, d.row) for d in found] == list(zip(texts, range(4), strict=True))[start:]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_data_set_with_nulls_never_reads_none(tmp_path, streaming):
    pq.write_table(pa.table({"content": ["a", None, "b"]}), tmp_path / "train.parquet")
    source = Source(hub=Hub(path=str(tmp_path), streaming=streaming), text="content")
    bad: Counter[str] = Counter()
    assert [d.text for d in documents("hub", source, on_bad_row="skip", bad=bad)] == ["a", "b"]
    assert bad == {"null": 1}
    with pytest.raises(UserError, match=r"no field 'text'; there are \['content'\]: give data.text="):
        list(documents("hub", Source(hub=source.hub), on_bad_row="skip", bad=bad))


@pytest.mark.parametrize(
    ("hub", "says"),
    [(Hub(path="{}/nowhere"), "nowhere"), (Hub(path="{}", split="test"), "test"), (Hub(path="{}", name="x"), "x")],
)
def test_a_data_set_that_is_not_there_is_a_user_error(tmp_path, hub, says):
    (tmp_path / "train.jsonl").write_bytes(json_lines(["a"]))
    hub = Hub(path=hub.path.format(tmp_path), split=hub.split, name=hub.name)
    with pytest.raises(UserError, match=says):
        list(documents("hub", Source(hub=hub), on_bad_row="skip", bad=Counter()))


def test_a_name_with_glob_characters_is_read(tmp_path):
    path = tmp_path / "we[i]rd *.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    assert [d.text for d in read(path)] == ["a"]


def test_nothing_is_left_in_the_cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "t.parquet")
    (tmp_path / "t.txt").write_text("a")
    read(tmp_path / "t.parquet", tmp_path / "t.txt")
    assert not cache.exists()


keys = st.binary(min_size=32, max_size=32)


@given(keys, st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_a_larger_share_holds_out_more_of_the_same(key, one, other, seed):
    low, high = sorted((one, other))
    assert held_out(key, low, seed) <= held_out(key, high, seed)
    assert not held_out(key, 0.0, seed) and held_out(key, 1.0, seed)


@given(keys, st.floats(0, 5), st.integers(0, 1000))
def test_packs_is_the_floor_or_one_more(key, weight, seed):
    assert packs(key, weight, seed) - int(weight) in (0, 1)
    assert packs(key, int(weight), seed) == int(weight)


def test_shares_weights_and_seeds():
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(20_000)]
    out = [held_out(key, 0.1, 0) for key in keys]
    assert abs(sum(out) / len(keys) - 0.1) < 0.01
    assert abs(sum(packs(key, 2.5, 0) for key in keys) / len(keys) - 2.5) < 0.02
    assert [held_out(key, 0.1, 1) for key in keys] != out
    # the coin of the weight is independent of the split
    assert abs(sum(packs(key, 0.5, 0) for key, held in zip(keys, out, strict=True) if held) / sum(out) - 0.5) < 0.05
    # the split of a text must never change between versions: pinned
    assert [i for i, key in enumerate(keys[:60]) if held_out(key, 0.1, 0)] == [0, 1, 8, 14, 16, 29, 32, 44, 59]


def test_a_fingerprint_knows_content_and_settings_but_not_the_folder(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "t.jsonl").write_bytes(json_lines(["a"]))
    base = Source(files=(str(one / "t.jsonl"),))
    same = fingerprint(base)
    assert fingerprint(Source(files=(str(two / "*.jsonl"),))) == same
    assert json.loads(json.dumps(same)) == same
    assert fingerprint(Source(files=base.files, weight=2.0)) != same
    assert fingerprint(Source(files=base.files, text="content")) != same
    assert fingerprint(Source(files=base.files, max_mb=1.0)) != same
    (one / "t.jsonl").write_bytes(json_lines(["b"]))
    assert fingerprint(base) != same
    hub = fingerprint(Source(hub=Hub(path=str(two))))
    assert fingerprint(Source(hub=Hub(path=str(two), streaming=False))) == hub
    assert fingerprint(Source(hub=Hub(path=str(two), revision="x"))) != hub
    (two / "t.jsonl").write_bytes(json_lines(["c"]))
    assert fingerprint(Source(hub=Hub(path=str(two)))) != hub


# ---------------------------------------------------------------- conversations

USER, ANSWER = {"role": "user", "content": "é\u2028?"}, {"role": "assistant", "content": "b"}
MADE_OF = hashlib.sha256(b"the pretraining document").digest()


def calling(name: str, arguments: dict | str) -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


# Rows that no table can hold as they are: other keys, other types, a null of one's own.
TALKS = [
    {"id": 1, "messages": [USER, ANSWER], "document": MADE_OF.hex()},
    {
        "id": 2,
        "messages": [USER, calling("f", {"x": 1, "n": None}), {"role": "tool", "content": "r"}, ANSWER],
        "document": None,
    },
    {"id": 3, "messages": [USER, calling("g", {"y": "s", "z": {"k": [1]}})], "document": MADE_OF.hex().upper()},
    {"id": 4, "messages": [USER, {**ANSWER, "weight": 1}, USER, {**ANSWER, "weight": 0}]},
    {"id": 5, "messages": [USER, calling("h", '{"a": 1}')]},
]
GOOD = [
    [USER, ANSWER],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1, "n": None}}]},
        {"role": "tool", "content": "r"},
        ANSWER,
    ],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "g", "arguments": {"y": "s", "z": {"k": [1]}}}]},
    ],
    [USER, ANSWER, USER, {**ANSWER, "weight": 0}],
    [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "h", "arguments": '{"a": 1}'}]}],
]


def talks(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_talks(source: ConversationSource, **settings) -> list[Document]:
    return list(documents("own", source, **{"on_bad_row": "error", "bad": Counter(), **settings}))


@pytest.mark.parametrize("kind", ["jsonl", "gz", "hub", "streamed"])
def test_conversations_are_read_as_written(tmp_path, kind):
    """A set whose rows differ so much is stored as JSON by `datasets`, whose nulls are the writer's own."""
    path = talks(tmp_path / "train.jsonl", TALKS)
    if kind == "gz":
        path = tmp_path / "train.jsonl.gz"
        path.write_bytes(gzip.compress((tmp_path / "train.jsonl").read_bytes()))
    hub = Hub(path=str(tmp_path), streaming=kind == "streamed")
    source = ConversationSource(files=(str(path),)) if kind in ("jsonl", "gz") else ConversationSource(hub=hub)
    for start in (0, 2):
        found = read_talks(source, start=start)
        assert [(d.content, d.row) for d in found] == list(zip(GOOD, range(5), strict=True))[start:]
    found = read_talks(source)
    assert [d.digest for d in found] == [hashlib.sha256(canonical(messages)).digest() for messages in GOOD]
    assert [d.key for d in found] == [MADE_OF, found[1].digest, MADE_OF, found[3].digest, found[4].digest]
    assert [d.num_bytes for d in found] == [len(canonical(messages)) for messages in GOOD]


@pytest.mark.parametrize("kind", ["file", "hub"])
def test_a_table_of_conversations_has_nulls_that_nobody_wrote(tmp_path, kind):
    rows = [row for row in TALKS if row["id"] != 5]
    rows[1] = {**rows[1], "messages": [USER, calling("f", {"x": 1}), {"role": "tool", "content": "r"}, ANSWER]}
    table = pa.Table.from_pylist(rows)
    assert table["messages"].to_pylist()[0][0]["tool_calls"] is None
    pq.write_table(table, tmp_path / "train.parquet")
    source = (
        ConversationSource(files=(f"{tmp_path}/*",))
        if kind == "file"
        else ConversationSource(hub=Hub(path=str(tmp_path)))
    )
    found = read_talks(source)
    expected = [GOOD[0], [USER, {**GOOD[1][1], "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}, *GOOD[1][2:]]]
    assert [d.content for d in found] == [*expected, *GOOD[2:4]]
    assert [d.key == MADE_OF for d in found] == [True, False, True, False]


def test_a_document_and_its_conversations_are_held_out_together(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    (tmp_path / "t.jsonl").write_bytes(json_lines(texts))
    made = [
        {"messages": [USER, {**ANSWER, "content": f"{i} {n}"}], "document": hashlib.sha256(text.encode()).hexdigest()}
        for i, text in enumerate(texts)
        for n in range(2)
    ]
    found = read_talks(ConversationSource(files=(str(talks(tmp_path / "c.jsonl", made)),)))
    out = [held_out(document.key, 0.2, 5) for document in read(tmp_path / "t.jsonl")]
    assert [held_out(document.key, 0.2, 5) for document in found] == [held for held in out for _ in range(2)]
    assert 30 < sum(out) < 90 and len({document.digest for document in found}) == 600


# CASES, odd conversations, and what else a line may hold: the line and the reason
ODD = [
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "content null"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty content"),
    ({"messages": [USER, {"content": "b"}]}, "role missing"),
    ({"messages": [USER, {"role": "bot", "content": "b"}]}, "unknown role"),
    ({"messages": [{"role": "system", "content": "a"}] * 2 + [USER, ANSWER]}, "two system turns"),
    ({"messages": [ANSWER, USER]}, "assistant first"),
    ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "lone surrogate"),
    ({"messages": None}, "null"),
    ({"text": "a"}, "no messages field"),
    ([USER, ANSWER], "not an object"),
    ({"messages": [USER, ANSWER], "document": "12"}, "document is no SHA-256"),
    ({"messages": [USER, ANSWER], "document": 12}, "not a string"),
]


@pytest.mark.parametrize(("row", "reason"), ODD, ids=[reason for _, reason in ODD])
def test_an_odd_conversation_is_counted_or_an_error_with_file_and_line(tmp_path, row, reason):
    path = talks(tmp_path / "c.jsonl", [TALKS[0], row, TALKS[0]])
    source, bad = ConversationSource(files=(str(path),)), Counter()
    assert [(d.content, d.row) for d in read_talks(source, on_bad_row="skip", bad=bad)] == [(GOOD[0], 0), (GOOD[0], 2)]
    assert bad == {reason: 1}
    with pytest.raises(UserError) as error:
        read_talks(source)
    for part in (f"{path}, line 2", reason, "'messages'", "chat.on_bad_row=skip"):
        assert part in str(error.value)


def test_truncated_bytes_in_a_conversation_are_one_bad_row(tmp_path):
    """Half a character: in a line, and in a table, where the rows around it are read."""
    line = json.dumps(TALKS[0]).encode()
    (tmp_path / "c.jsonl").write_bytes(line + b"\n" + line.replace(b'"b"', b'"\xf0\x9f\x99"') + b"\n" + line)
    table = pa.Table.from_pylist([{"messages": [USER, {**ANSWER, "content": text}]} for text in ("a", "XYZ", "b")])
    pq.write_table(table, tmp_path / "c.parquet", compression="none", use_dictionary=False, write_statistics=False)
    content = (tmp_path / "c.parquet").read_bytes()
    assert content.count(b"XYZ") == 1
    (tmp_path / "c.parquet").write_bytes(content.replace(b"XYZ", b"\xf0\x9f\x99"))
    for name in ("c.jsonl", "c.parquet"):
        bad: Counter[str] = Counter()
        found = read_talks(ConversationSource(files=(f"{tmp_path}/{name}",)), on_bad_row="skip", bad=bad)
        assert [d.row for d in found] == [0, 2] and bad == {"not UTF-8": 1}


def test_messages_of_conversations_name_their_own_flags(tmp_path):
    talks(tmp_path / "train.jsonl", TALKS[:1])
    for source, says in (
        (ConversationSource(files=("none.jsonl",)), r"change chat\.files"),
        (ConversationSource(files=(str(tmp_path / "none"),)), r"change chat\.files"),
        (ConversationSource(hub=Hub(path=str(tmp_path)), text="talk"), r"no field 'talk'; there are .*chat\.text="),
    ):
        with pytest.raises(UserError, match=says):
            read_talks(source)


def test_a_share_of_its_own_is_in_the_fingerprint(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(json_lines(["a"]))
    plain, own = (fingerprint(Source(files=(f"{tmp_path}/t.jsonl",), validation=share)) for share in (None, 0.5))
    assert own == plain | {"validation": 0.5} and "validation" not in plain


def test_how_much_text_is_known_before_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 300_000)
    (tmp_path / "b.jsonl").write_bytes(b"y" * 500_000)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"z" * 900_000))
    source = lambda *names, **more: Source(files=tuple(str(tmp_path / name) for name in names), **more)  # noqa: E731
    assert expected_bytes(source("a.txt", "b.jsonl")) == 800_000
    assert expected_bytes(source("a.txt", "b.jsonl", max_mb=0.6)) == 600_000
    assert expected_bytes(source("a.txt", max_mb=0.6)) == 300_000
    assert expected_bytes(source("a.txt", "c.txt.gz")) is None  # the size of a compressed file is not that of its text
    assert expected_bytes(source("c.txt.gz", max_mb=0.6)) == 600_000
    with pytest.raises(UserError, match="no such file"):
        expected_bytes(source("none.txt"))
