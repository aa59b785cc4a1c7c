"""The record of a run, which survives every death: ``metrics.jsonl``.

A row of ``metrics.jsonl`` is one JSON object with ``step`` and ``tokens``; keys are ``SECTION/NAME``. Everything
that depends on the clock or the machine stands in the sections ``time/``, ``throughput/`` and ``memory/``; the
other sections are equal between a run that was stopped and one that was not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stack.core import files

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
                    files.sync(discarded.fileno())
                file.truncate(offset)
        self._file = open(self.path, "ab")  # noqa: SIM115  closed by close()

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row. A number that is not finite is written as the string of it, as JSON has none."""
        self._file.write(json.dumps(_safe(row), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def offset(self) -> int:
        """Bytes written so far, safe on disk."""
        files.sync(self._file.fileno())
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
