"""What a run writes and shows: ``metrics.jsonl``, the record that survives every death, and the terminal.

A row of ``metrics.jsonl`` is one JSON object with ``step`` and ``tokens``; keys are ``SECTION/NAME``. Everything
that depends on the clock or the machine stands in the sections ``time/``, ``throughput/`` and ``memory/``; the
other sections are equal between a run that was stopped and one that was not.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from stack.core import files as disk

if TYPE_CHECKING:
    from stack.tracking.wandb_run import WandbRun

MEASURED = ("time/", "throughput/", "memory/")  # sections that two equal runs need not share


class Metrics:
    """``metrics.jsonl``, append-only. ``offset`` bytes of it belong to a checkpoint; what lies beyond is moved away.

    Args:
        folder: the run's.
        offset: bytes that stay, as the checkpoint that is resumed says; 0 for a new run.
    """

    def __init__(self, folder: Path, offset: int):
        self.path = folder / "metrics.jsonl"
        with open(self.path, "a+b") as file:
            file.seek(offset)
            if beyond := file.read():
                with open(folder / "metrics.discarded.jsonl", "ab") as discarded:
                    discarded.write(beyond if beyond.endswith(b"\n") else beyond + b"\n")
                    discarded.flush()
                    disk.sync(discarded.fileno())
                file.truncate(offset)
        self._file = open(self.path, "ab")  # noqa: SIM115  closed by close()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row. A number that is not finite is written as the string of it, as JSON has none."""
        self._file.write(json.dumps(_safe(row), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def offset(self) -> int:
        """Bytes written so far, safe on disk."""
        disk.sync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _safe(value: Any) -> Any:
    """With every number that is not finite, at any depth, as the string of it."""
    if isinstance(value, float):
        return str(value) if value - value != 0 else value
    if isinstance(value, dict):
        return {key: _safe(entry) for key, entry in value.items()}
    return [_safe(entry) for entry in value] if isinstance(value, list | tuple) else value


class Tracker:
    """Where a run's rows go, on rank 0: ``metrics.jsonl`` first, which holds them whatever happens, then wandb.

    Args:
        metrics: the record.
        wandb: the run beside it, where there is one.
    """

    def __init__(self, metrics: Metrics, wandb: WandbRun | None = None):
        self._metrics, self._wandb = metrics, wandb

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row: ``step``, ``tokens`` and keys ``SECTION/NAME``.

        A value is a number, a text, a list of either, or a histogram, ``{"counts": [n], "edges": [n + 1]}``.
        """
        if self._wandb is not None and self._wandb.failures:
            row = row | {"time/tracking_failures": self._wandb.failures}
        self._metrics.write(row)
        if self._wandb is not None:
            self._wandb.alive()
            self._wandb.log(row)

    def alive(self) -> None:
        """There is progress, though nothing is written."""
        if self._wandb is not None:
            self._wandb.alive()

    def alert(self, title: str, text: str, *, level: str = "WARN") -> None:
        """Has wandb tell who follows the run; levels are INFO, WARN and ERROR."""
        if self._wandb is not None:
            self._wandb.alert(title, text, level)

    def offset(self) -> int:
        """Bytes of the record so far, safe on disk."""
        return self._metrics.offset()

    def close(self, exit_code: int) -> None:
        """Ends both; wandb gets ``exit_code`` and what is left."""
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code)


class Display:
    """The terminal: a live line where there is one, a plain line every few seconds in a pipe or a log file.

    Only rank 0 speaks. The live line is as wide as the window and drops its last parts where they do not fit; what is
    shown for good is never cut. Colours are rich's: none under ``NO_COLOR``, in a pipe, or in a dumb terminal. What the
    encoding of the output has not got is written as an escape.
    """

    def __init__(self, on: bool, *, every_s: float = 10.0):
        self.on = on
        if isinstance(sys.stdout, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # of a stream that cannot be flushed
                sys.stdout.reconfigure(errors="backslashreplace")
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.every_s = every_s
        self._live: Progress | None = None
        self._last = -every_s

    def show(self, line: str) -> None:
        """One line."""
        if self.on:
            self.console.print(line, markup=False)

    def start(self, done: int, steps: int) -> None:
        """Begins to show progress at step ``done`` of ``steps``."""
        if self.on and self.console.is_terminal and not self.console.is_dumb_terminal:
            bar = (BarColumn(bar_width=20),) if self.console.width >= 80 else ()
            self._taken = len(f"{steps}/{steps} ") + 21 * len(bar)  # columns
            text = TextColumn("{task.completed}/{task.total} {task.description}", markup=False)
            self._live = Progress(*bar, text, console=self.console, transient=True)
            self._live.start()
            self._task = self._live.add_task("", total=steps, completed=done)

    def step(self, done: int, steps: int, parts: list[str]) -> None:
        """Shows where a run is, in parts, the most important first; in a pipe only so often."""
        if self._live is not None:
            room = self.console.width - self._taken
            self._live.update(self._task, completed=done, description=fitting(parts, room))
        elif self.on and (time.monotonic() - self._last >= self.every_s or done == steps):
            self._last = time.monotonic()
            self.show("  ".join([f"step {done}/{steps}", *parts]))

    def wait(self, line: str) -> None:
        """Shows what goes on between steps; in a pipe only so often."""
        if self._live is not None:
            self._live.update(self._task, description=fitting([line], self.console.width - self._taken))
        elif self.on and time.monotonic() - self._last >= self.every_s:
            self._last = time.monotonic()
            self.show(line)

    def stop(self) -> None:
        """Ends the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def fitting(parts: list[str], room: int) -> str:
    """As many of ``parts`` as ``room`` columns hold, from the first on; the first is cut where it is too long."""
    line = parts[0][: max(room, 0)]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > room:
            break
        line += f"  {part}"
    return line


def duration(seconds: float) -> str:
    """``3:07`` or ``2:03:07``."""
    minutes, s = divmod(round(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"
