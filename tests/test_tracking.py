"""stack.tracking: a record without gap, duplicate or half a line, and a terminal that stays readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.tracking import Display, Metrics, duration


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_rows_are_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "low": -float("inf"), "text": "ü\u2028\n"})
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert json.loads(text) == {"step": 1, "loss": "nan", "norm": "inf", "low": "-inf", "text": "ü\u2028\n"}


@settings(deadline=None)
@given(before=st.integers(0, 5), after=st.integers(0, 5), torn=st.booleans())
def test_what_lies_beyond_a_checkpoint_is_moved_not_lost(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    first = Metrics(folder, 0)
    for step in range(before):
        first.write({"step": step})
    offset = first.offset()
    for step in range(before, before + after):
        first.write({"step": step})
    first.close()
    if torn:
        with open(folder / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 9')
    second = Metrics(folder, offset)
    assert second.offset() == offset
    second.write({"step": "new"})
    second.close()
    assert lines(folder / "metrics.jsonl") == [*({"step": step} for step in range(before)), {"step": "new"}]
    aside = folder / "metrics.discarded.jsonl"
    kept = aside.read_bytes().splitlines() if aside.exists() else []
    assert kept[:after] == [json.dumps({"step": step}).encode() for step in range(before, before + after)]
    assert kept[after:] == ([b'{"step": 9'] if torn else [])


def test_in_a_pipe_progress_is_a_line_now_and_then_and_always_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(True, every_s=1000)
    display.start(0, 50)
    for step in range(1, 51):
        display.step(step, 50, f"loss [{step}]")
    display.stop()
    display.show("[red]as it is[/red]")
    assert capsys.readouterr().out.splitlines() == [
        "step 1/50  loss [1]",
        "step 50/50  loss [50]",
        "[red]as it is[/red]",
    ]


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(False)
    display.start(0, 2)
    display.step(1, 2, "loss")
    display.show("line")
    display.stop()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
