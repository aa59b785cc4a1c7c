"""Where a run's rows go: the record, and wandb beside it."""

from __future__ import annotations

from typing import Any

from stack.tracking.metrics import Metrics
from stack.tracking.wandb_run import WandbRun


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
