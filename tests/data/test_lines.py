"""stack.data.lines: a compressed file is read whole or not at all, wherever it is cut and whatever is behind it."""

import bz2
import gzip
import json
import lzma
import struct
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from stack.config.schema import Hub, Source
from stack.core.errors import UserError
from stack.data import lines
from stack.data.sources import documents, snapshot

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
WITH_CHECKSUM = {**COMPRESS, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
FIRST, SECOND = ["a", "b\u2028"], ["c" * 50, "d"]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(path: Path) -> list[str]:
    source, bad = Source(files=(str(path),)), Counter()
    found = [d.text for d in documents("own", source, on_bad_row="skip", bad=bad, known=snapshot(source))]
    assert not bad
    return found


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_cut_at_any_byte_is_an_error_or_the_frames_before_the_cut(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    one, two = (COMPRESS[suffix](json_lines(texts)) for texts in (FIRST, SECOND))
    for cut in range(len(one + two)):
        path.write_bytes((one + two)[:cut])
        if cut == len(one):  # nothing shows that there was more
            assert read(path) == FIRST
            continue
        with pytest.raises(UserError, match=rf"t\.jsonl\{suffix} cannot be read: .*(cut|damaged)"):
            read(path)
    path.write_bytes(one + two)
    assert read(path) == FIRST + SECOND


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("behind", [b"x", b"garbage, and more of it", b"\x1f", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f"])
def test_what_stands_behind_a_frame_is_a_frame(tmp_path, suffix, behind):
    """The readers of gz, bz2 and xz pass over what they cannot read there, and lose what it was."""
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](json_lines(FIRST)) + behind)
    with pytest.raises(UserError, match=r"behind 1 whole .* damaged|ends inside .* 2: the file is cut"):
        read(path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_flipped_byte_never_changes_a_text(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    whole = WITH_CHECKSUM[suffix](json_lines(FIRST)) + WITH_CHECKSUM[suffix](json_lines(SECOND))
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            assert read(path) == FIRST + SECOND  # a byte that decides nothing: a time, an operating system
        except UserError as error:
            assert path.name in str(error)


def test_padding_and_skippable_frames_hold_nothing(tmp_path):
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"index"
    for suffix, before, behind in ((".gz", b"", b"\0" * 9), (".xz", b"", b"\0" * 8), (".zst", skippable, skippable)):
        path = tmp_path / f"t.jsonl{suffix}"
        path.write_bytes(before + COMPRESS[suffix](json_lines(FIRST)) + behind)
        assert read(path) == FIRST
    (tmp_path / "t.jsonl.zst").write_bytes(skippable + COMPRESS[".zst"](json_lines(FIRST)) + skippable[:-1])
    with pytest.raises(UserError, match="frame 3: the file is cut"):
        read(tmp_path / "t.jsonl.zst")


def test_much_out_of_little_comes_in_parts():
    much = zstandard.compress(bytes(2**28))[: lines.FEED]
    with pytest.raises(lines.Damaged, match="cut"):
        for part in lines.decompressed([much], ".zst"):
            assert len(part) <= 2**27


def test_a_window_of_two_gigabytes_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)  # more than the library takes unasked
    path = tmp_path / "t.jsonl.zst"
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(compressor.compress(json_lines(FIRST)) + compressor.flush())  # of a stream: no size is stored
    assert read(path) == FIRST


def test_parquet_cut_at_any_byte_is_an_error(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": FIRST + SECOND}), path)
    whole = path.read_bytes()
    assert read(path) == FIRST + SECOND
    for cut in [*range(0, len(whole), 5), *range(len(whole) - 12, len(whole))]:
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"t\.parquet cannot be read"):
            read(path)


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_torn_last_line_is_a_bad_row(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    torn = json_lines(FIRST)[:-4]
    path.write_bytes(COMPRESS[suffix](torn) if suffix else torn)
    bad: Counter[str] = Counter()
    found = list(documents("own", Source(files=(str(path),)), on_bad_row="skip", bad=bad))
    assert [d.text for d in found] == FIRST[:1] and bad == {"not JSON": 1}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_data_set_folder_with_a_cut_file_is_refused(tmp_path, monkeypatch, suffix, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / f"train.jsonl{suffix}"
    # The .zst ends behind a block of whole lines, so no line tells of the cut.
    compressor = zstandard.ZstdCompressor().compressobj()
    flushed = compressor.compress(json_lines(FIRST)) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    path.write_bytes(flushed if suffix == ".zst" else COMPRESS[suffix](json_lines(FIRST))[:-1])
    source = Source(hub=Hub(path=str(folder), streaming=streaming))
    with pytest.raises(UserError, match=rf"train\.jsonl\{suffix} cannot be read: .*the file is cut"):
        list(documents("hub", source, on_bad_row="skip", bad=Counter()))


# ---------------------------------------------------------------- .json

RECORDS = [{"text": 'é🙂\\"]}[', "n": [1, -2.5e10, None, True]}, {"text": "x" * 50}, {"text": ""}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 20])
def test_json_is_an_array_or_lines(tmp_path, monkeypatch, indent, ascii_only, chunk):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    path = tmp_path / "t.json"
    array = json.dumps(RECORDS, indent=indent, ensure_ascii=ascii_only).encode()
    for written in (array, b"\xef\xbb\xbf\n " + array + b"\n\n"):
        path.write_bytes(written)
        assert read(path) == [record["text"] for record in RECORDS]
    path.write_bytes(json_lines(FIRST))
    assert read(path) == FIRST
    path.write_bytes(b" [ ] ")
    assert read(path) == []


def test_an_array_that_is_cut_or_damaged_is_an_error_with_its_record(tmp_path):
    path = tmp_path / "t.json"
    whole = json.dumps(RECORDS).encode()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"t\.json cannot be read: .*(the file is cut|damaged or cut)"):
            read(path)
    for written, says in {
        b'[{"text": "a"} {"text": "b"}]': "after record 1 of its array stands '{'",
        b'[{"text": "a"}, nope' + b" " * 100 + b"]": "record 2 of its array is damaged",
        b'[{"text": "a"}]\n[{"text": "b"}]': "more stands behind the array",
        b"[" * 100_000: "record 1 of its array is no JSON",
    }.items():
        path.write_bytes(written)
        with pytest.raises(UserError, match=says):
            read(path)


def test_bad_records_of_an_array_are_counted(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"text": "a"}, 3, {"text": null}, {"TEXT": "a"}, {"text": "\xff"}, {"text": "b"}]')
    bad: Counter[str] = Counter()
    found = list(documents("own", Source(files=(str(path),)), on_bad_row="skip", bad=bad))
    assert [(d.text, d.row) for d in found] == [("a", 0), ("b", 5)]
    assert bad == {"not an object": 1, "null": 1, "no text field": 1, "lone surrogate": 1}
    with pytest.raises(UserError, match=r"t\.json, record 2: not an object"):
        list(documents("own", Source(files=(str(path),)), on_bad_row="error", bad=bad))
