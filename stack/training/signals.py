"""Signals that ask a run to stop: the step in hand is finished and saved first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stack.core.ranks import Ranks

STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # SIGHUP: the terminal of the run has gone
SAME_S = 1.0  # torchrun passes on what a terminal has sent to all: within this time it is one signal


class Signals:
    """The first signal of ``STOPPING`` that came, while :meth:`heard` lasts."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Notes the first signal; a second one ends the process at once.

        What is ignored already stays so, as SIGHUP under nohup.
        """
        listened = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in listened}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def of_any_rank(self, ranks: Ranks) -> int:
        """The first of ``STOPPING`` that any rank has, 0 for none; the same on every rank."""
        seen = self.number  # read once: another may come at any time
        had = ranks.sum(*(seen == number for number in STOPPING))
        return next((number.value for number, count in zip(STOPPING, had, strict=True) if count), 0)

    def _note(self, number: int, _: Any) -> None:
        if self.number and time.monotonic() - self._since > SAME_S:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()
