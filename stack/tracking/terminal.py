"""The terminal of a run: a live line, or plain lines in a pipe."""

from __future__ import annotations

import contextlib
import io
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


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
