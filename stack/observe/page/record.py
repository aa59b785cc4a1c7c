"""What a run's folder tells of the run, read back: metrics, settings, manifests, and what is wrong with any of them.

Reading never fails because of one bad part: what is torn, missing or damaged becomes a line of ``warnings``, and the
rest is shown.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stack import checkpoint
from stack.checkpoint import Manifest
from stack.core.errors import UserError
from stack.model.embedding import row_names
from stack.model.huggingface import WEIGHTS
from stack.observe import audit
from stack.text.display import quoted
from stack.training import run_folder

COUNTS_OF_TROUBLE = re.compile(r"(skipped|fail|discarded|dropped|non_?finite|retries|bad_)", re.IGNORECASE)


@dataclass(frozen=True)
class AuditRow:
    """One row of the table as the audit lists it."""

    id: int
    token: str
    occurrences: int | None  # in the packed data, where they are known
    norm: float
    indicator: float  # low: undertrained
    nearest: str  # cosines and tokens of the nearest rows


@dataclass(frozen=True)
class Series:
    """One key of ``metrics.jsonl`` over the run; float64 arrays of one length, NaN where a value is not finite."""

    step: np.ndarray
    tokens: np.ndarray
    value: np.ndarray


@dataclass
class Record:
    """A run, read back."""

    folder: Path
    name: str
    config: dict[str, Any]  # every setting
    resolved: dict[str, Any]  # what was fixed from them
    rows: list[dict[str, Any]]  # of metrics.jsonl
    manifests: dict[str, Manifest]  # of the whole checkpoints, by folder name, oldest first
    audit: list[AuditRow]
    warnings: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The end of the run."""
        return int(self.resolved["steps"])

    @property
    def step(self) -> int:
        """The last step in the record."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def tokens(self) -> int:
        """Supervised tokens behind the last step."""
        return int(self.rows[-1]["tokens"]) if self.rows else 0

    @property
    def newest(self) -> tuple[str, Manifest] | None:
        """The newest whole checkpoint."""
        return next(reversed(self.manifests.items()), None)

    @property
    def growth(self) -> dict[str, Any]:
        """What growth did to the table; empty where it did not grow."""
        found = [manifest.identity["growth"] for manifest in self.manifests.values() if "growth" in manifest.identity]
        return found[0] if found else {}

    def names(self, prefix: str = "") -> list[str]:
        """The keys that begin with ``prefix``, in the order of their first appearance."""
        return [key for key in dict.fromkeys(key for row in self.rows for key in row) if key.startswith(prefix)]

    def series(self, key: str) -> Series:
        """All values of one key; lists, texts and objects are left out."""
        found = [
            (row["step"], row["tokens"], value) for row in self.rows if (value := number_of(row.get(key))) is not None
        ]
        return Series(*np.array(found, dtype=np.float64).reshape(-1, 3).T)

    def last(self, key: str) -> Any:
        """The newest value of a key; None where there is none."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def parameters(self) -> tuple[int, int] | None:
        """Parameters of the newest checkpoint, and those of them in the table; from the header of its file alone."""
        if self.newest is None:
            return None
        with open(self.folder / "checkpoints" / self.newest[0] / WEIGHTS, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        return sum(shapes.values()), sum(shapes[name] for name in row_names(shapes))


def number_of(value: Any) -> float | None:
    """A number of ``metrics.jsonl``, where what is not finite stands as a text; None for anything else."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read(folder: Path) -> Record:
    """Reads a run.

    Raises:
        UserError: there is no run in ``folder``, or its settings cannot be read.
    """
    values = run_folder.read_config(folder)
    if values is None:
        beside = run_folder.names(folder.parent)
        raise UserError(f"{folder}: there is no run (no config.yaml); runs beside it: {beside}")
    config = {key: value for key, value in values.items() if key != "resolved"}
    record = Record(folder, str(config["name"]), config, values["resolved"], [], {}, [])
    _read_metrics(record)
    _read_checkpoints(record)
    _read_audit(record)
    _warn_of_values(record)
    return record


def _read_metrics(record: Record) -> None:
    path = record.folder / "metrics.jsonl"
    bad = 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            row["step"] + row["tokens"]
        except (ValueError, TypeError, KeyError):
            bad += 1
        else:
            record.rows.append(row)
    if bad:
        record.warnings.append(f"metrics.jsonl: {_count(bad, 'line')} cannot be read and {_is(bad)} left out")
    if not record.rows:
        record.warnings.append("metrics.jsonl has no row: no step was taken yet")
    steps = [row["step"] for row in record.rows if "train/loss" in row]
    every = (record.config.get("track") or {}).get("every", 1)
    gaps = [f"{a} to {b}" for a, b in itertools.pairwise(steps) if b <= a or (b - a > every and b != record.steps)]
    if gaps:
        record.warnings.append(f"metrics.jsonl jumps between rows: step {', '.join(gaps[:5])}")
    aside = record.folder / "metrics.discarded.jsonl"
    if aside.exists() and (count := aside.read_bytes().count(b"\n")):
        record.warnings.append(
            f"{_count(count, 'row')} written after the checkpoint that the run went on from {_is(count)} set aside in "
            "metrics.discarded.jsonl: the steps were taken again"
        )


def _read_checkpoints(record: Record) -> None:
    for path in checkpoint.steps(record.folder / "checkpoints"):
        try:
            record.manifests[path.name] = checkpoint.read_manifest(path)
        except UserError as error:
            record.warnings.append(f"damaged checkpoint {path.name}: {error}")
    for aside in sorted(record.folder.glob("checkpoints.discarded-*")):
        names = ", ".join(sorted(path.name for path in aside.iterdir()))
        record.warnings.append(f"the run was set back with resume=; later checkpoints stand in {aside.name}: {names}")


def _read_audit(record: Record) -> None:
    """The audit that the run wrote at its end, or ``python -m stack.audit json=runs/NAME/audit.json`` since."""
    path = record.folder / audit.NAME
    if not path.exists():
        return
    try:
        record.audit.extend(audit_rows(json.loads(path.read_bytes())))
    except (OSError, ValueError, TypeError, KeyError) as error:
        record.warnings.append(f"{audit.NAME} cannot be read ({error!r})")


def audit_rows(found: dict[str, Any]) -> list[AuditRow]:
    """Of the rows that an audit lists, in its order, those that are not known to be unused, with its ``indicator``."""
    return [
        AuditRow(
            id=int(row["id"]),
            token=quoted(row["text"]),
            occurrences=None if row["occurrences"] is None else int(row["occurrences"]),
            norm=float(row["norm"]),
            indicator=float(row[found["indicator"]]),
            nearest="  ".join(f"{near['cosine']:.2f} {quoted(near['text'])}" for near in row["nearest"]),
        )
        for row in found["listed"]
        if not row["known_unused"]
    ]


def _warn_of_values(record: Record) -> None:
    skipped = number_of(record.last("train/skipped_steps")) or 0
    if skipped:
        record.warnings.append(
            f"{_count(int(skipped), 'step')} skipped: nothing to learn in {_it(skipped)}, or a loss or gradient norm "
            "that was not finite; weights and moments stayed as they were"
        )
    for key in record.names():
        values = [row[key] for row in record.rows if key in row]
        bad = [row["step"] for row in record.rows if isinstance(row.get(key), str) and number_of(row[key]) is not None]
        if bad:
            record.warnings.append(f"{key}: {_count(len(bad), 'value')} not finite, first at step {bad[0]}")
        total = number_of(values[-1])
        if key != "train/skipped_steps" and total and COUNTS_OF_TROUBLE.search(key):
            record.warnings.append(f"{key} ended at {total:g}")
    waiting = record.series("throughput/waiting_share").value
    if waiting.size and (share := float(np.nanmedian(waiting))) > 0.05:
        record.warnings.append(f"half of the steps waited for data more than {share * 100:.0f} % of their time")
    if record.rows and record.step < record.steps:
        record.warnings.append(f"not finished: step {record.step:,} of {record.steps:,}")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _it(n: float) -> str:
    return "it" if n == 1 else "them"
