"""A small corpus from its text to a model: one file, little text, and nothing held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.config import schema as config
from stack.data import sources as corpus
from stack.data.holding_out import rule_of
from stack.data.packed import open_packed
from stack.evaluation import answers
from stack.text.tokenizer import load

PARAGRAPHS = [f"{'The cat ran to the red house of stone. ' * 3}It was day {i}.\n\n" for i in range(60)]


def book(root: Path, text: str = "".join(PARAGRAPHS)) -> Path:
    (root / "book.txt").write_text(text, encoding="utf-8")
    return root / "book.txt"


def trained(root: Path, *more: str) -> tuple[tiny.Job, Path]:
    job = tiny.train(root, f"data.files={root / 'book.txt'}", "data.validation=0.1", *more)
    assert job.wait() == 0, job.output()
    return job, root / "runs/tiny"


def packed_of(run: Path, root: Path):
    resolved = yaml.safe_load((run / "config.yaml").read_text())["resolved"]["identity"]
    return open_packed(Path(resolved["packed_folder"]) if Path(resolved["packed_folder"]).is_absolute() else root)


def texts(run: Path, root: Path, split: str) -> list[str]:
    found = packed_of(run, root).split(split)
    words = load(next((run / "checkpoints").glob("step-*")))
    return [words.decode(found.ids(int(a) + 1, int(n) - 1)) for a, n in zip(found.starts, found.lengths, strict=True)]


def test_one_text_file_holds_out_its_last_part_from_a_paragraph_on(tmp_path: Path) -> None:
    book(tmp_path)
    job, run = trained(tmp_path)
    assert "the last part of the text is held out" in job.output()
    (learnt,), (held_out,) = texts(run, tmp_path, "train"), texts(run, tmp_path, "validation")
    assert learnt + held_out == "".join(PARAGRAPHS)
    assert learnt.endswith("\n\n") and held_out in ("".join(PARAGRAPHS[i:]) for i in range(60))
    assert 0.05 <= len(held_out) / len(learnt + held_out) <= 0.15
    last = tiny.rows(run)[-1]
    assert "eval/bits_per_byte" in last


@pytest.mark.parametrize(
    "text", ["x", "one line of text, no more", "".join(PARAGRAPHS[:2]), "word " * 5000, "ab" * 20000]
)
def test_text_that_can_be_trained_on_is_not_refused(tmp_path: Path, text: str) -> None:
    book(tmp_path, text)
    job, run = trained(tmp_path, "train.steps=1")
    assert "".join(texts(run, tmp_path, "train") + texts(run, tmp_path, "validation")) == text
    assert "held out" in job.output() or "no validation" in job.output()


def test_nothing_held_out_trains_without_validation(tmp_path: Path) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl")
    job = tiny.train(tmp_path, "data.validation=0", "evaluate.every=2", "checkpoint.every=2", "track.report=true")
    assert job.wait() == 0, job.output()
    run = tmp_path / "runs/tiny"
    assert not [key for row in tiny.rows(run) for key in row if key.startswith("eval/")]
    said = job.output()
    assert "no validation" in said and "train loss" in said and "sample:" in said and "Traceback" not in said
    assert json.loads((run / "checkpoints/step-00000006/manifest.json").read_text())["metric"] is None
    assert (run / "report.html").is_file() and (run / "audit.json").is_file()
    assert packed_of(run, tmp_path).split("validation").num_documents == 0
    assert packed_of(run, tmp_path).split("train").num_documents == 40


@pytest.mark.parametrize(("count", "share"), [(1, 0.3), (4, 0.01), (10, 0.0)])
def test_few_conversations_or_none_are_held_out(tmp_path: Path, count: int, share: float) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl")
    assert tiny.train(tmp_path, "train.steps=1").wait() == 0
    tiny.conversations(tmp_path / "talk.jsonl", count=count)
    job = tiny.sft(tmp_path, f"chat.validation={share}", "train.steps=2", "track.report=true")
    assert job.wait() == 0, job.output()
    held = packed_of(tmp_path / "runs/talk", tmp_path).split("validation").num_documents
    assert held == (1 if count == 4 else 0)
    assert ("training text: none is held out" in job.output()) == (held == 0)
    assert "Traceback" not in job.output()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=400), min_size=1, max_size=8), st.floats(0.01, 0.9))
def test_every_text_is_on_one_side_and_nothing_is_lost(tmp_path_factory, documents: list[str], share: float) -> None:
    root = tmp_path_factory.mktemp("drawn")
    kept = [text.encode(errors="ignore").decode() for text in documents]
    (root / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    source = config.Source(files=(str(root / "t.jsonl"),))
    data = tiny.configure(*tiny.settings(root, f"data.files={root / 't.jsonl'}", f"data.validation={share}")).data
    rule = rule_of(data)
    sides: dict[str, set[bool]] = {}
    for document in corpus.documents("files", source, on_bad_row="error", bad={}):
        parts = list(rule.parts(source, document))
        assert "".join(part.text for part, _ in parts) == document.text
        assert len(parts) == 1 or all(part.text for part, _ in parts)
        for part, held_out in parts:
            sides.setdefault(part.text, set()).add(held_out)
    if any(kept):
        assert any(False in side for text, side in sides.items() if text), "something is left to learn from"


def test_the_questions_are_of_what_is_held_out(tmp_path: Path) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl")
    tiny.conversations(tmp_path / "talk.jsonl", count=5)
    assert tiny.train(tmp_path, "train.steps=1").wait() == 0
    job = tiny.sft(tmp_path, "chat.validation=0.01", "train.steps=1")
    assert job.wait() == 0, job.output()
    run = tmp_path / "runs/talk"
    asked = json.loads((run / answers.KEPT).read_text())["questions"]
    (held_out,) = texts(run, tmp_path, "validation")
    assert asked and all(question["text"] in held_out for question in asked)
