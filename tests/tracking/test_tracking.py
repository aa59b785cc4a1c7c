"""stack.tracking.metrics: a record without gap, duplicate or half a line, and a terminal that stays readable."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import sys
import termios
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.tracking.metrics import Metrics
from stack.tracking.terminal import Display, duration, fitting


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_rows_are_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    nan, inf = float("nan"), float("inf")
    deep = {"counts": [1, 2], "edges": [nan, 0.5, inf]}
    metrics.write({"step": 1, "loss": nan, "norm": inf, "low": -inf, "text": "ü\u2028\n", "deep": deep})
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.count("\n") == 1 and text.endswith("\n")
    deep = {"counts": [1, 2], "edges": ["nan", 0.5, "inf"]}
    wanted = {"step": 1, "loss": "nan", "norm": "inf", "low": "-inf", "text": "ü\u2028\n", "deep": deep}
    assert json.loads(text) == wanted


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
        display.step(step, 50, [f"loss [{step}]", "ETA 0:01"])
    display.stop()
    display.show("[red]as it is[/red]")
    assert capsys.readouterr().out.splitlines() == [
        "step 1/50  loss [1]  ETA 0:01",
        "step 50/50  loss [50]  ETA 0:01",
        "[red]as it is[/red]",
    ]


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(False)
    display.start(0, 2)
    display.step(1, 2, ["loss"])
    display.show("line")
    display.stop()
    assert capsys.readouterr().out == ""


@given(parts=st.lists(st.text(max_size=30), min_size=1, max_size=6), room=st.integers(-5, 120))
def test_a_fitting_line_is_the_beginning_and_fits(parts: list[str], room: int) -> None:
    line = fitting(parts, room)
    assert len(line) <= max(room, 0) and "  ".join(parts).startswith(line)
    if len("  ".join(parts)) <= room:
        assert line == "  ".join(parts)


def _train_at(terminal: str, arguments: list[str]) -> None:
    device = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(device, 1)
    os.dup2(device, 2)
    for name in ("COLUMNS", "LINES"):  # would hide the terminal's own
        os.environ.pop(name, None)
    tiny.command(arguments)


def at_a_terminal(root: Path, columns: int, name: str, **env: str) -> bytes:
    """All that a small run writes to a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(ours, False)
    more = (f"name={name}", "train.steps=60")  # long enough for the live line to be drawn within
    job = tiny.Job(_train_at, os.ttyname(theirs), tiny.settings(root, *more), log=root / f"{name}.log", env=env)
    written = b""

    def ended() -> bool:
        nonlocal written
        over = job.poll() is not None
        try:
            while part := os.read(ours, 65536):
                written += part
        except BlockingIOError:
            return over
        return over

    tiny.until(ended)
    os.close(ours)
    os.close(theirs)
    assert job.wait() == 0, job.output()
    return written


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


FIGURES = ("finished: 60 steps", "  bits per byte ", "  tokens ", "  tokens/s ", "  peak memory ", "  time ")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def the_end(text: str) -> list[str]:
    """The last lines of a run, as a person sees them."""
    lines = [ESCAPE.sub("", line.rsplit("\r", 1)[-1]) for line in text.replace("\r\n", "\n").rstrip().split("\n")]
    return [line for line in lines if line.strip()][-7:]


@pytest.mark.parametrize(("env", "colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_in_a_narrow_window_the_live_line_fits_and_the_end_stays(root: Path, env: dict[str, str], colour: bool) -> None:
    for columns in (40, 100):
        name = f"columns-{columns}-{len(env)}"
        text = at_a_terminal(root, columns, name, **{"TERM": "xterm-256color", "COLORTERM": "", **env}).decode()
        assert "\x1b[?25l" in text and text.count("\x1b[?25h") == 1  # the cursor comes back
        begin = text.index("\x1b[?25l")
        live = [line for line in re.split(r"[\r\n]+", text[begin:]) if re.match(r"\x1b\[2K.*\d+/60 ", line)]
        assert live and [line for line in live if len(ESCAPE.sub("", line)) > columns] == []
        assert any("loss " in line and "ETA" in line for line in live)
        assert bool(re.search(r"\x1b\[[0-9;]*[39]\d", text)) == (colour and columns >= 80)  # the bar alone has any
        *figures, where = the_end(text)
        assert all(line.startswith(start) for line, start in zip(figures, FIGURES, strict=True))
        assert all(len(line) <= 40 for line in figures) and where.endswith("checkpoints/step-00000060")


def test_a_dumb_terminal_gets_plain_lines(root: Path) -> None:
    text = at_a_terminal(root, 40, "dumb", TERM="dumb").decode()
    assert "\x1b" not in text and "step 60/60  loss " in text
    assert the_end(text)[0] == "finished: 60 steps"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_file_has_no_escape_and_ends_with_the_figures(root: Path, encoding: str) -> None:
    name = f"file-{encoding}"
    job = tiny.Job(_train_encoded, encoding, tiny.settings(root, f"name={name}", "train.steps=60"), log=root / name)
    assert job.wait() == 0, job.output()
    text = (root / name).read_text(encoding)
    assert "\x1b" not in text and "\r" not in text
    assert ("layers × 32" if encoding == "utf-8" else "layers \\xd7 32") in text
    *figures, where = the_end(text)
    assert all(line.startswith(start) for line, start in zip(figures, FIGURES, strict=True))
    assert where == f"{root}/runs/{name}/checkpoints/step-00000060"


def _train_encoded(encoding: str, arguments: list[str]) -> None:
    sys.stdout.reconfigure(encoding=encoding, errors="strict")
    tiny.command(arguments)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
