"""stack.data.files: the files that a person means, each once, and each what its digest says."""

import gzip
import json
import os
import shutil
import socket
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stack.config import schema as config
from stack.config.schema import Hub, HubFlags, Source
from stack.core.errors import UserError
from stack.data import packing, sampling
from stack.data.files import Changed, find
from stack.data.sampling import train_tokenizer
from stack.data.sources import documents, expected_bytes, fingerprint, snapshot

TEXTS = [f"document {number} " + "of some words " * (number % 5) for number in range(40)]


def write(path: Path, texts: list[str] = TEXTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(*files: Path | str) -> list[str]:
    source = Source(files=tuple(map(str, files)))
    return [d.text for d in documents("own", source, on_bad_row="error", bad=Counter(), known=snapshot(source))]


def names(*patterns: str) -> list[str]:
    return [str(path) for path in find(patterns).files]


# Names that a protocol parser, a glob, a shell, a configuration or a terminal takes for something else.
ODD = ["a::b", "zip:", "x#y", "x?y", "x[1]y", "x*y", "**", "~", "$HOME", "{x}", "%41", "é", "back\\slash", "new\nline"]
ODD += ["a, (b) 'c' \"d\"", os.fsdecode(b"caf\xe9")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a test, and the one that it is in; `datasets` keeps its own elsewhere."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


# ---------------------------------------------------------------- which files


def test_names_and_patterns(here):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "we[i]rd *.parquet", "d.csv", "e.parquet.gz", "deep/er/f.jsonl"):
        write(here / name, [name])
    assert names("c.txt", "*.jsonl", "a.jsonl") == ["c.txt", "a.jsonl", "b.jsonl"]
    assert names("**/f.jsonl") == names("deep/**/*.jsonl") == names("**/er/*") == ["deep/er/f.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/er/f.jsonl"]
    assert names(f"{here}/**/*.jsonl") == [f"{here}/{name}" for name in names("**/*.jsonl")]
    assert names("we[i]rd *.parquet") == ["we[i]rd *.parquet"]
    for pattern, says in {
        "none.jsonl": "no such file",
        "*.xyz": "no such file",
        "none/**/*.jsonl": "no such file",
        "d.csv": "not read from .csv",
        "e.parquet.gz": "not read from .gz",
        "": "an empty name",
        "\0.jsonl": "no such file",
        "x" * 5000: "no such file",
        "https://example.org/t.jsonl": "what is elsewhere is fetched first",
    }.items():
        with pytest.raises(UserError, match=says):
            find((pattern,))


def test_a_folder_is_all_that_is_read_below_it(here):
    for name in ("c/b.jsonl", "c/deep/er/a.txt", "c/Z.JSONL", "c/.hidden/no.txt", "c/.no.txt", "c/x.csv", "c/README"):
        write(here / name, [name])
    pq.write_table(pa.table({"text": ["table"]}), here / "c/deep/t.parquet")
    assert names("c") == names("c/") == ["c/Z.JSONL", "c/b.jsonl", "c/deep/er/a.txt", "c/deep/t.parquet"]
    assert read("c")[:2] == ["c/Z.JSONL", "c/b.jsonl"]
    assert find(("c",)).said() == "4 files (2 .jsonl, 1 .parquet, 1 .txt); not read below c/: 1 .csv, 1 without suffix"
    assert find(("c/deep/t.parquet",)).said() is None
    assert fingerprint(Source(files=("c",))) == fingerprint(Source(files=tuple(names("c"))))
    assert expected_bytes(Source(files=("c/deep/er",))) == (here / "c/deep/er/a.txt").stat().st_size
    (here / "empty").mkdir()
    write(here / "other/x.csv")
    for folder, says in {"empty": "no file below this folder", "other": r"there are 1 \.csv.*read are \.jsonl"}.items():
        with pytest.raises(UserError, match=says):
            find((folder,))


@pytest.mark.parametrize("suffix", [".TXT", ".JSONL", ".JsonL.GZ", ".NDJSON"])
def test_capitals_change_no_suffix(here, suffix):
    content = write(here / "t").read_bytes()
    (here / f"T{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("GZ") else content)
    assert read(f"T{suffix}") == (TEXTS if suffix != ".TXT" else [content.decode()])


@pytest.mark.parametrize("name", ODD)
def test_what_exists_is_taken_as_it_is(here, name):
    """A neighbour whose name the pattern matches is not read."""
    write(here / "xzy" / "t.jsonl", ["neighbour"])
    write(here / name / f"{name}.jsonl", ["own"])
    pq.write_table(pa.table({"text": ["own"]}), here / "t.parquet")
    os.rename(here / "t.parquet", here / name / f"{name}.parquet")
    for given in (f"{name}/{name}.jsonl", f"{name}/{name}.parquet"):
        assert read(f"./{given}") == read(here / given) == ["own"]
        assert name == "~" or read(given) == ["own"]  # which is home in front of a path, as in a shell
    assert read(f"./{name}") == read(here / name) == ["own", "own"]
    json.dumps(fingerprint(Source(files=(str(here / name),))), ensure_ascii=False).encode()
    with pytest.raises(UserError):
        write(here / name / f"{name}.jsonl", ["own"]).write_text("bad")
        read(f"{here}/{name}/{name}.jsonl")


def test_the_tilde_is_home(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    write(here / "t.jsonl")
    write(here / "set/train.jsonl")
    assert names("~/t.jsonl") == names("~/*.jsonl") == [f"{here}/t.jsonl"]
    hub = Source(hub=Hub(path="~/set"))
    assert [d.text for d in documents("hub", hub, on_bad_row="error", bad=Counter())] == TEXTS
    assert fingerprint(hub)["files"] == fingerprint(Source(hub=Hub(path=str(here / "set"))))["files"]
    for name in ("~nobody-of-this-name/t.jsonl", "~"):
        monkeypatch.setenv("HOME", "/nowhere")
        with pytest.raises(UserError, match="no such file"):
            find((name,))


def test_what_can_be_read_only_once_is_refused(here):
    os.mkfifo("pipe.jsonl")
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket.txt")
    server.close()
    os.symlink("/dev/zero", "zero.txt")
    out, into = os.pipe()
    for name in ("pipe.jsonl", "socket.txt", "zero.txt", f"/dev/fd/{out}", "."):
        with pytest.raises(UserError, match=r"is a pipe or a device, and text is read more than once"):
            read(name)
    os.close(out)
    os.close(into)


def test_what_cannot_be_read_says_why(here):
    os.symlink("gone.jsonl", "link.jsonl")
    os.symlink("turns.jsonl", "turns.jsonl")
    os.symlink("/proc/self/mem", "memory.txt")  # may be opened, and refuses to be read, to root, too
    for name, says in {
        "link.jsonl": r"link\.jsonl is a link to gone\.jsonl, which is not there",
        "*.jsonl": r"link\.jsonl is a link to gone\.jsonl",
        "turns.jsonl": r"turns\.jsonl cannot be read: Too many levels",
        "memory.txt": r"memory\.txt cannot be read: Input/output error",
    }.items():
        with pytest.raises(UserError, match=says):
            read(name)


def test_what_may_not_be_read_is_told(here):
    write(here / "t.jsonl").chmod(0)
    write(here / "shut/t.jsonl").parent.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # nobody
    try:
        for given in ("t.jsonl", str(here / "t.jsonl"), str(here / "shut/t.jsonl"), "shut", "shut/**/*.jsonl"):
            with pytest.raises(UserError, match=r"cannot be read: Permission denied"):
                read(given)
    finally:
        if root:
            os.seteuid(0)
        (here / "shut").chmod(0o700)


def test_nothing_is_one_file_or_none(here):
    for name in ("t.txt", "t.jsonl", "t.ndjson", "t.json"):
        (here / name).touch()
        assert read(name) == ([""] if name == "t.txt" else [])
    for name in ("t.parquet", "t.jsonl.gz", "t.txt.zst", "t.txt.xz", "t.txt.bz2"):
        (here / name).touch()
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read(name)


# ---------------------------------------------------------------- each once


def test_a_loop_of_folders_is_walked_once(here):
    write(here / "c/t.jsonl")
    write(here / "c/deep/u.jsonl", ["u"])
    os.symlink(".", "c/loop")
    os.symlink("..", "c/deep/up")
    os.symlink(here, "c/whole")  # two loops or more: as many ways as there are numbers
    for given in ("c/**/*.jsonl", "c", "**/*.jsonl"):
        assert names(given) == ["c/deep/u.jsonl", "c/t.jsonl"]
        assert read(given) == ["u", *TEXTS]
    assert find(("c",)).again == 3  # the loop, the way up, and the folder itself in the one above


def test_a_linked_folder_is_read(here):
    write(here / "elsewhere/t.jsonl")
    (here / "c").mkdir()
    os.symlink("../elsewhere", "c/more")
    assert names("c/**/*.jsonl") == names("c") == ["c/more/t.jsonl"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_of_many_names_comes_once(here, link):
    write(here / "c/t.jsonl")
    link(here / "c/t.jsonl", here / "c/s.jsonl")
    link(here / "c/t.jsonl", here / "u.jsonl")
    (here / "d").mkdir()
    for given in (
        ("c/*.jsonl", "u.jsonl"),
        ("u.jsonl", "./u.jsonl", str(here / "u.jsonl"), "../here/u.jsonl", "d/../u.jsonl", "c/../u.jsonl"),
        ("c", "c/", "c/**", "*.jsonl", "u.jsonl"),
    ):
        found = find(given)
        assert len(found.files) == 1 and found.files[0].name in ("s.jsonl", "u.jsonl")
        assert read(*given) == TEXTS
        assert f"{found.again} names lead to a file or folder that is there already" in found.said()
    assert fingerprint(Source(files=("u.jsonl", "./u.jsonl"))) == fingerprint(Source(files=("u.jsonl",)))


def test_equal_files_are_two(here):
    """A file is what it is, not what it says: a copy is a second one, as it always was."""
    shutil.copy(write(here / "a.jsonl", ["a"]), here / "b.jsonl")
    assert read("*.jsonl") == ["a", "a"]


# ---------------------------------------------------------------- what was read is what is named


def growing(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "more"}\n')


def same_size(path: Path) -> None:
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])  # the last text's, or a table's footer's
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    os.replace(write(path.with_name("new"), TEXTS[:39]), path)


def gone(path: Path) -> None:
    path.unlink()


CHANGES = [growing, same_size, replaced, gone]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "within", "early"])
@pytest.mark.parametrize("kind", ["files", "hub"])
def test_a_file_that_changed_since_its_digest_is_an_error(here, change, when, kind):
    path = write(here / "c/train.jsonl")
    source = Source(files=(str(path),)) if kind == "files" else Source(hub=Hub(path=str(path.parent)))
    if when == "early":  # the rest of the file is not read
        source = Source(files=source.files, hub=source.hub, max_mb=0.0001)
    known = snapshot(source)
    with pytest.raises(UserError, match=r"train\.jsonl.*changed|train\.jsonl cannot be read: No such file"):
        if when == "before":
            change(path)
        for document in documents("own", source, on_bad_row="skip", bad=Counter(), known=known):
            if document.row == 0 and when != "before":
                change(path)


@pytest.mark.parametrize("change", CHANGES[:3])
def test_a_table_or_a_compressed_file_that_changed_is_not_called_damaged(here, change):
    pq.write_table(pa.table({"text": TEXTS}), here / "t.parquet")
    (here / "t.txt.gz").write_bytes(gzip.compress(b"document 39", compresslevel=0))
    for name in ("t.parquet", "t.txt.gz"):
        source = Source(files=(name,))
        known = snapshot(source)
        change(here / name)
        with pytest.raises(Changed, match=r"SHA-256 [0-9a-f]{64}, and then it had .* start again when nobody writes"):
            list(documents("own", source, on_bad_row="skip", bad=Counter(), known=known))


def test_a_row_that_a_change_tore_is_not_called_bad(here):
    source = Source(files=(str(write(here / "t.jsonl", ["x" * 100] * 50_000)),))
    known = snapshot(source)
    with pytest.raises(Changed, match=r"t\.jsonl changed"):
        for document in documents("own", source, on_bad_row="error", bad=Counter(), known=known):
            if document.row == 0:
                os.truncate(here / "t.jsonl", 2_000_000)


def test_a_new_time_mode_or_link_is_no_change(here):
    path = write(here / "t.jsonl")
    source = Source(files=("t.jsonl",))
    found = []
    for document in documents("own", source, on_bad_row="error", bad=Counter(), known=snapshot(source)):
        found.append(document.text)
        if document.row == 0:
            os.utime(path)
            path.chmod(0o600)
            os.link(path, here / "u.jsonl")
    assert found == TEXTS


def test_without_a_digest_a_change_while_reading_is_an_error(here):
    path = write(here / "t.jsonl")
    for change in (growing, replaced):
        with pytest.raises(Changed, match="changed while it was read"):
            for document in documents("own", Source(files=("t.jsonl",)), on_bad_row="error", bad=Counter()):
                if document.row == 0:
                    change(path)


NO_HUB = HubFlags(path=None, name=None, split="train", revision=None, streaming=True)


@pytest.fixture
def made(here):
    """A tokenizer, and data that are packed in five blocks."""
    write(here / "t.jsonl", [f"{n} " + "some words of a text " * 20 for n in range(100)])
    data = config.Data(
        name="mine",
        sources={},
        files=("t.jsonl",),
        hub=NO_HUB,
        text="text",
        on_bad_row="skip",
        validation=0.2,
        seed=0,
        workers=1,
        shard_mb=0.009,
        packed=None,
    )
    settings = config.Tokenizer(name="small", vocab_size=320, sample_mb=1.0, seed=0, folder=None)
    return data, settings, train_tokenizer(settings, data, here, lambda line: None)


@pytest.mark.parametrize("change", CHANGES[:3])
@pytest.mark.parametrize("block", [1, 3])
def test_nothing_is_kept_that_was_packed_of_a_file_that_changed(here, made, monkeypatch, change, block):
    data, _, words = made
    path = here / "t.jsonl"
    first = path.read_bytes()
    close, closed = packing.Block.close, []

    def closing(self, progress):
        close(self, progress)
        closed.append(1)
        if len(closed) == block:
            change(path)

    with monkeypatch.context() as patch, pytest.raises(Changed, match=r"t\.jsonl changed while it was read"):
        patch.setattr(packing.Block, "close", closing)
        packing.pack(data, words, here, lambda line: None)
    assert len(closed) == block  # the next one was not kept, not even for a moment
    assert not list((here / "packed").glob("mine*"))
    path.write_bytes(first)
    made_of_it = packing.pack(data, words, here, lambda line: None)
    assert made_of_it.digest == packing.pack(data, words, here / "clean", lambda line: None).digest


def test_a_tokenizer_is_not_made_of_a_file_that_changes(here, made, monkeypatch):
    data, _, _ = made
    shutil.rmtree(here / "tokenizers")
    drawn = sampling.uniform

    def drawing(*what):
        growing(here / "t.jsonl")
        return drawn(*what)

    monkeypatch.setattr(sampling, "uniform", drawing)
    for sample_mb in (1.0, 0.0001):  # all of the file is read, or only what the sample needs
        with pytest.raises(Changed, match=r"t\.jsonl changed"):
            train_tokenizer(config.Tokenizer("small", 320, sample_mb, 0, None), data, here, lambda line: None)
    assert not list((here / "tokenizers").iterdir())


def test_what_is_found_is_said_when_it_is_read(here, made):
    data, settings, words = made
    write(here / "c/a.jsonl", TEXTS)
    write(here / "c/b.md", TEXTS)
    lines: list[str] = []
    data = config.Data(**{**vars(data), "files": ("c", "./c/a.jsonl")})
    for _ in range(2):
        train_tokenizer(settings, data, here, lines.append)
        packing.pack(data, words, here, lines.append)
    said = "files: 1 file (1 .jsonl); not read below c/: 1 .md; 1 name leads to a file or folder that is there"
    assert [line.startswith(said) for line in lines].count(True) == 2  # by each stage, and not where it is finished


# ---------------------------------------------------------------- data set folders


@pytest.mark.parametrize("name", ["x?y", "x*y", "x[z]y", "a::b"])
def test_a_data_set_folder_that_the_library_takes_for_a_pattern_is_refused(here, name):
    """It would read the neighbours whose names match, or find nothing."""
    write(here / "xzy/train.jsonl", ["neighbour"])
    write(here / name / "train.jsonl", ["own"])
    with pytest.raises(UserError, match=r"data\.hub\.path=.*cannot read from a folder with .*data\.files="):
        snapshot(Source(hub=Hub(path=name)))
    assert read(name) == ["own"]


def test_a_data_set_folder_with_a_loop_is_read_once(here):
    write(here / "set/train.jsonl")
    os.symlink(".", "set/loop")
    source = Source(hub=Hub(path="set"))
    known = snapshot(source)
    assert len(known.files) == 1 and known.said is None
    os.link("set/train.jsonl", "set/test.jsonl")
    assert snapshot(source).said.startswith(
        "1 of the names in this folder are links to another"
    )  # it may be another split
    assert [d.text for d in documents("hub", source, on_bad_row="error", bad=Counter())] == TEXTS


@pytest.mark.parametrize("streaming", [True, False])
def test_a_data_set_folder_is_read_as_it_is_now(here, streaming):
    """The library keeps what it does not stream, and knows a file by its name and time."""
    source = Source(hub=Hub(path="set", streaming=streaming))
    for text in ("one", "two"):
        os.utime(write(here / "set/train.jsonl", [text]), (1e9, 1e9))
        for known in (snapshot(source), None):
            found = documents("hub", source, on_bad_row="error", bad=Counter(), known=known)
            assert [d.text for d in found] == [text]
