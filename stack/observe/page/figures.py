"""The five figures that matter of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stack.observe.page.memory import in_gb
from stack.observe.page.parts import finite, number
from stack.observe.page.pictures import short
from stack.observe.page.record import Record
from stack.tracking.terminal import duration


@dataclass(frozen=True)
class Figure:
    """One of the five figures that matter."""

    name: str
    value: str
    unit: str
    more: str


def figures(run: Record) -> list[Figure]:
    """Quality, tokens, time, throughput, memory; what is not in the record is left out."""
    return [figure for make in (_quality, _seen, _time, _speed, _peak) if (figure := make(run)) is not None]


def _quality(run: Record) -> Figure | None:
    bits, loss = finite(run.last("eval/bits_per_byte")), finite(run.last("eval/loss"))
    if math.isfinite(bits):
        return Figure("Validation", f"{bits:.3f}", "bits per byte", f"{loss:.3f} nats per token")
    if math.isfinite(loss):
        return Figure("Validation", f"{loss:.3f}", "nats per token", _solved(run))
    losses = run.series("train/loss").value[-20:]
    if not np.isfinite(losses).any():
        return None
    return Figure("Training loss", f"{np.nanmean(losses):.3f}", "nats per token", f"mean of {len(losses)} steps")


def _seen(run: Record) -> Figure | None:
    if not run.rows:
        return None
    return Figure("Learnt", short(float(f"{run.tokens:.3g}")), "tokens", f"step {run.step:,} of {run.steps:,}")


def _time(run: Record) -> Figure | None:
    seconds = run.series("time/step_s").value
    if not np.isfinite(seconds).any():
        return None
    every = (run.config.get("track") or {}).get("every", 1)
    about = "about " if every > 1 else ""
    return Figure("Time in steps", duration(float(np.nansum(seconds)) * every), "",
                  f"{about}{np.nanmedian(seconds):.3g} s a step")  # fmt: skip


def _speed(run: Record) -> Figure | None:
    speed, waiting = (run.series(f"throughput/{key}").value for key in ("tokens_per_s", "waiting_share"))
    if not np.isfinite(speed).any():
        return None
    more = f"{np.nanmedian(waiting) * 100:.0f} % waiting for data" if np.isfinite(waiting).any() else "median"
    return Figure("Throughput", number(float(f"{np.nanmedian(speed):.3g}")), "tokens/s", more)


def _peak(run: Record) -> Figure | None:
    peak = finite(run.last("memory/peak_gb"))
    plan = in_gb((run.resolved.get("memory") or {}).get("planned") or {}).get("peak")
    if not math.isfinite(peak):
        return None
    return Figure("Peak memory", f"{peak:.2f}", "GB", f"{plan:.2f} GB planned" if plan else "of one process")


def _solved(run: Record) -> str:
    shares = [finite(run.last(key)) for key in run.names("eval/exact_")]
    return f"{np.nanmean(shares) * 100:.0f} % of {len(shares)} tasks answered exactly" if shares else "held-out answers"
