"""The end of a sweep: a table that compares its runs, and their page."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from stack.config.sweep import Job
from stack.core.errors import UserError
from stack.observe.page import page, record
from stack.observe.page.parts import finite
from stack.observe.page.record import Record
from stack.tracking.terminal import duration


def compare(jobs: Sequence[Job]) -> None:
    """Prints a line for each run, with what differs and how it ended, and writes ``RUNS_DIR/TITLE.html``, said last.

    A run that is not there, or not to be read, has its exit code alone.
    """
    found = [_record(job) for job in jobs]
    keys = list(dict.fromkeys(key for job in jobs for key in job.differs))
    head = ["run", *keys, "steps", "loss", "bits/byte", "time", "exit"]
    rows = [
        [job.name, *(job.differs.get(key, "") for key in keys), *_figures(run), str(job.code)]
        for job, run in zip(jobs, found, strict=True)
    ]
    print("\n".join(["", *_table([head, *rows])]), flush=True)
    stopped = jobs[-1].code > 128
    if stopped:
        print(f"the sweep is stopped by signal {jobs[-1].code - 128}; the same command goes on from here")
    elif not any((run.config.get("track") or {}).get("report", True) for run in found if run is not None):
        return
    elif folders := list(dict.fromkeys(run.folder for run in found if run is not None)):
        try:
            print(f"page: {page.write(folders, Path(jobs[0].runs_dir) / f'{jobs[0].title}.html')}")
        except (UserError, OSError) as error:
            print(f"no page: {error}", file=sys.stderr)


def _record(job: Job) -> Record | None:
    try:
        return record.read(Path(job.runs_dir) / job.name)
    except (UserError, OSError):
        return None


def _figures(run: Record | None) -> list[str]:
    """Steps, loss, bits per byte and time in steps; of the newest validation, and the training's loss without one."""
    if run is None:
        return ["", "", "", ""]
    losses = [finite(run.last(key)) for key in ("eval/loss", "train/loss")]
    loss = next((value for value in losses if math.isfinite(value)), math.nan)
    seconds = [value for value in run.series("time/step_s").value if math.isfinite(value)]
    every = (run.config.get("track") or {}).get("every", 1)
    numbers = [
        f"{value:.4f}" if math.isfinite(value) else "" for value in (loss, finite(run.last("eval/bits_per_byte")))
    ]
    return [f"{run.step}/{run.steps}", *numbers, duration(sum(seconds) * every)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; nothing is cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
