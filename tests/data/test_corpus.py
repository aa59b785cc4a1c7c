"""stack.data.corpus: what is read is what was written, and nothing is dropped without being counted."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stack.config import Hub, Source, UserError
from stack.data import lines
from stack.data.corpus import Document, documents, fingerprint, held_out, packs, resolve_files

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


def test_names_and_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "we[i]rd *.parquet", "d.csv", "e.parquet.gz"):
        (tmp_path / name).touch()
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/f.jsonl").touch()
    assert [p.name for p in resolve_files(("c.txt", "*.jsonl", "a.jsonl"))] == ["c.txt", "a.jsonl", "b.jsonl"]
    assert resolve_files(("**/f.jsonl",)) == [Path("deep/er/f.jsonl")]
    assert resolve_files(("we[i]rd *.parquet",)) == [Path("we[i]rd *.parquet")]
    for pattern, says in {
        "none.jsonl": "no such file",
        "*.xyz": "no such file",
        "deep": "is a folder",
        "d.csv": "not read from .csv",
        "e.parquet.gz": "not read from .gz",
    }.items():
        with pytest.raises(UserError, match=says):
            resolve_files((pattern,))


def test_a_name_with_glob_characters_is_read(tmp_path):
    path = tmp_path / "we[i]rd *.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    assert [d.text for d in read(path)] == ["a"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_cut_file_is_a_user_error_that_names_it(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](json_lines([os.urandom(3000).hex()]))[:-100])
    with pytest.raises(UserError, match=path.name):
        read(path)


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
