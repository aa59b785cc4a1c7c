"""A small corpus holds out its last part; every other one what the hash says. Held-out text is never learnt."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.config import schema as config
from stack.core.files import read_json, write_json
from stack.data import packing
from stack.data import sources as corpus
from stack.data.holding_out import LEAST, rule_of
from stack.data.packed import SPLITS
from stack.data.sampling import train_tokenizer

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "went", "down", "to", "his", "little", "boat", "again"]
COMMON = {
    "files": (),
    "hub": config.HubFlags(path=None, name=None, split="train", revision=None, streaming=True),
    "on_bad_row": "skip",
    "seed": 0,
    "workers": 1,
    "packed": None,
    "shard_mb": 1.0,
}


def data_of(sources: dict[str, config.Source], **changed) -> config.Data:
    given = COMMON | {"name": "mine", "text": "text", "validation": 0.02} | changed
    return config.Data(sources=sources, **given)


def talk_of(path: Path, rows: list[dict], **changed) -> config.Conversations:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = COMMON | {"name": "talk", "text": "messages", "validation": 0.1, "too_long": "cut"} | changed
    return config.Conversations(sources={"c": config.ConversationSource(files=(str(path),))}, **given)


def text_file(path: Path, text: str, **changed) -> config.Source:
    path.write_bytes(text.encode())
    return config.Source(files=(str(path),), **changed)


def json_file(path: Path, texts: list[str], **changed) -> config.Source:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return config.Source(files=(str(path),), **changed)


def sides(data: config.Data) -> tuple[list, list]:
    """What is learnt from and what is held out, in order."""
    rule, found = rule_of(data), ([], [])
    for name, source in data.resolved_sources().items():
        for document in corpus.documents(name, source, on_bad_row="error", bad=Counter()):
            for part, held_out in rule.parts(source, document):
                found[held_out].append(part.content)
    return found


SENTENCES = " ".join(f"{word.capitalize()} {' '.join(WORDS)}." for word in WORDS)
TEXTS = {  # each with the borders that it has, from the best on
    "paragraphs": ("\n\n".join([SENTENCES] * 60), r"\n\n$"),
    "of other systems": ("\r\n\r\n".join([SENTENCES] * 60), r"\r\n\r\n$"),
    "lines": ("\n".join([SENTENCES] * 60), r"\n$"),
    "lines that end in CR LF": ("\r\n".join([SENTENCES] * 60), r"\r\n$"),
    "one line": (" ".join([SENTENCES] * 60), r"\. $"),
    "Chinese": ("天地玄黄宇宙洪荒。" * 900, "。$"),
    "words": (" ".join(WORDS * 900), r"\w $"),
    "letters": ("acgt" * 9_000, "[acgt]$"),
    "emoji": ("🙂" * 9_000, "🙂$"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_one_text_holds_out_its_last_part(tmp_path, name, share):
    text, border = TEXTS[name]
    (learnt,), (held_out,) = sides(data_of({"own": text_file(tmp_path / "own.txt", text)}, validation=share))
    assert learnt + held_out == text
    assert re.search(border, learnt)
    assert 0.5 * share <= len(held_out.encode()) / len(text.encode()) <= 1.5 * share


@pytest.mark.parametrize("text", ["a", "\n", "Only this.", "x" * (LEAST - 1), "x" * (50 * LEAST - 1)])
def test_a_text_too_short_to_part_is_learnt_whole(tmp_path, text):
    data = data_of({"own": text_file(tmp_path / "own.txt", text)})
    assert sides(data) == ([text], [])
    assert rule_of(data).says.startswith("no validation: 1 document, ")


LONG = ["".join(f"{n} seas. " for n in range(60)), "".join(f"{n} men\n\n" for n in range(300))]
documents = st.lists(st.sampled_from(["", "x" * 90, *LONG]) | st.text("ab \n"), max_size=12)


@given(st.lists(documents, min_size=1, max_size=3), st.sampled_from([0.01, 0.1, 0.5, 0.95]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_what_is_held_out_is_never_learnt_and_the_hash_comes_first(tmp_path_factory, sources, share, seed):
    folder = tmp_path_factory.mktemp("texts")
    made = {f"s{i}": json_file(folder / f"{i}.jsonl", texts) for i, texts in enumerate(sources)}
    data = data_of(made, validation=share, seed=seed)
    texts = [text for texts in sources for text in texts]
    by_hash: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        document = corpus._text({"text": text}, config.Source(), 0)
        by_hash[corpus.held_out(document.key, share, seed)].append(text)
    learnt, held_out = sides(data)
    if any(by_hash[0]) and any(by_hash[1]):
        assert (learnt, held_out) == by_hash and rule_of(data).says is None
        return
    assert not {text for text in held_out if text} & set(learnt)
    assert sum(map(len, learnt)) + sum(map(len, held_out)) == sum(map(len, texts))
    assert any(learnt) == any(texts)


def test_equal_texts_are_cut_alike(tmp_path):
    """A file that is there twice: the end of one copy is not learnt from the other."""
    text = TEXTS["paragraphs"][0]
    source = config.Source(
        files=(text_file(tmp_path / "a.txt", text).files + text_file(tmp_path / "b.txt", text).files)
    )
    learnt, held_out = sides(data_of({"own": source}))
    assert len(learnt) == len(held_out) == 2 and len(set(learnt)) == len(set(held_out)) == 1


def test_a_small_source_beside_one_that_has_validation_stays_as_it_is(tmp_path):
    big = json_file(tmp_path / "big.jsonl", [f"{number} {SENTENCES}" for number in range(400)])
    small = text_file(tmp_path / "small.txt", SENTENCES * 20)
    data = data_of({"big": big, "small": small})
    assert rule_of(data).last_parts is None
    assert SENTENCES * 20 in sides(data)[0]


def test_a_corpus_of_many_documents_is_read_only_until_both_sides_have_one(tmp_path, monkeypatch):
    source = json_file(tmp_path / "many.jsonl", [f"{number}" for number in range(20_000)])
    read = 0
    documents = corpus.documents

    def counted(*args, **settings):
        nonlocal read
        for document in documents(*args, **settings):
            read += 1
            yield document

    monkeypatch.setattr(corpus, "documents", counted)
    assert rule_of(data_of({"many": source})).says is None and read < 500
    read = 0
    assert rule_of(data_of({"many": source}, validation=0.0)).says is None and read == 0


def talks(count: int) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} " * (1 + n % 5)}]}
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_conversations_are_held_out_whole(tmp_path, count):
    """The last of a few, and never the only one."""
    for seed in range(6):
        data = talk_of(tmp_path / "c.jsonl", talks(count), seed=seed)
        learnt, held_out = sides(data)
        assert len(learnt) + len(held_out) == count and learnt
        assert len(held_out) == (0 if count == 1 else 1) or rule_of(data).last_parts is None
        rows = [row["messages"] for row in talks(count)]
        assert [m for m in rows if m in learnt] == learnt and not [m for m in learnt if m in held_out]


def test_the_tokenizer_sees_nothing_of_the_last_part(tmp_path):
    text = SENTENCES * 40 + "\n\n" + "zyzzyva " * 100
    data = data_of({"own": text_file(tmp_path / "own.txt", text)}, validation=800 / len(text))
    words = config.Tokenizer(name="t", vocab_size=512, sample_mb=1.0, seed=0, folder=None)
    made = train_tokenizer(words, data, tmp_path, print)
    assert len(made.encode(" again")) == 1 and len(made.encode(" zyzzyva")) == 8
    manifest = read_json(made.folder / "manifest.json")
    assert manifest["held_out"] == {"own": 800} and set(manifest["bytes_per_token"]) == {"own"}


def test_a_tokenizer_that_an_earlier_version_trained_on_all_of_a_text_is_not_taken(tmp_path):
    data = data_of({"own": text_file(tmp_path / "own.txt", SENTENCES * 40)})
    words = config.Tokenizer(name="t", vocab_size=320, sample_mb=1.0, seed=0, folder=None)
    made = train_tokenizer(words, data, tmp_path, print)
    manifest = read_json(made.folder / "manifest.json")
    del manifest["held_out"]
    write_json(made.folder / "manifest.json", manifest)
    assert train_tokenizer(words, data, tmp_path, print).folder == made.folder  # it measured on what it held out
    write_json(made.folder / "manifest.json", manifest | {"bytes_per_token": {}})
    again = train_tokenizer(words, data, tmp_path, print).folder
    assert again != made.folder
    assert train_tokenizer(words, data, tmp_path, print).folder == again


class Killed(Exception):
    pass


def test_a_text_in_two_parts_is_packed_alike_by_any_workers_and_after_any_death(tmp_path, monkeypatch):
    """The two parts of a row are finished together, or neither is."""
    texts = ["\n\n".join([f"{n}. {SENTENCES}"] * (40 if n < 2 else 1)) for n in range(3)]
    source = config.Source(files=tuple(text_file(tmp_path / f"{n}.txt", text).files[0] for n, text in enumerate(texts)))
    data = data_of({"own": source}, validation=0.05, shard_mb=0.001)
    assert len(sides(data)[0]) == 2 and len(sides(data)[1]) == 2  # one file whole on either side, one cut
    words = config.Tokenizer(name="t", vocab_size=320, sample_mb=1.0, seed=0, folder=None)
    made = train_tokenizer(words, data, tmp_path, print)
    expected = packing.pack(data, made, tmp_path / "once", print)
    names = {path.name for path in expected.folder.iterdir()}
    two = packing.pack(dataclasses.replace(data, workers=2), made, tmp_path / "two", print)
    close, deaths = packing.Block.close, 0

    def dies(block, progress):
        close(block, progress)
        raise Killed

    monkeypatch.setattr(packing.Block, "close", dies)
    while deaths < 50:
        try:
            killed = packing.pack(data, made, tmp_path / "killed", print)
            break
        except Killed:
            deaths += 1
    assert deaths >= 3
    for folder in (two.folder, killed.folder):
        assert {path.name for path in folder.iterdir()} == names
        assert all((folder / name).read_bytes() == (expected.folder / name).read_bytes() for name in names)
    for side, split in zip(sides(data), SPLITS, strict=True):
        found = expected.split(split)
        ids = [found.ids(int(s) + 1, int(n) - 1) for s, n in zip(found.starts, found.lengths, strict=True)]
        assert [made.decode(some) for some in ids] == side
