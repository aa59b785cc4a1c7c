"""Where the memory goes: the plan by part, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stack.observe.page import pictures
from stack.observe.page.parts import Picture, Section, Table, add, curve, finite, over, titled, union
from stack.observe.page.record import Record, number_of


def memory(runs: Sequence[Record]) -> Section:
    """What was planned, part by part, beside what was measured."""
    section = Section("memory", "Memory")
    facts = [run.resolved.get("memory") or {} for run in runs]
    if any(found.get("planned") for found in facts):
        section.pictures.append(_plan_and_measured(runs, facts))
    for name in union(run.names("memory/") for run in runs):
        if not {run.last(name) for run in runs} <= {0, None}:
            add(section, curve(*titled(name), over(runs, name), zero=True))
    return section


def _plan_and_measured(runs: Sequence[Record], facts: list[dict[str, Any]]) -> Picture:
    """The parts that stand at the planned peak, and of the measured one those that were measured apart."""
    peaks = [finite(run.last("memory/peak_gb")) for run in runs]
    plans = [in_gb(found.get("planned") or {}) for found in facts]
    known = [in_gb(found.get("measured") or {}) for found in facts]
    stacks = [at_peak(plan) for plan in plans]
    parts = union(stacks)
    bars: list[tuple[str, list[tuple[int, float]], str]] = []
    for run, stack, of_peak, peak in zip(runs, stacks, known, peaks, strict=True):
        suffix = f" {run.name}" if len(runs) > 1 else ""
        if stack:
            bar = [(parts.index(part), gb) for part, gb in stack.items()]
            bars.append((f"planned{suffix}", bar, f"{sum(stack.values()):.2f}"))
        if math.isfinite(peak):
            bar = [(parts.index(part), gb) for part, gb in of_peak.items() if part in parts]
            rest = max(0.0, peak - sum(gb for _, gb in bar))
            bars.append((f"measured{suffix}", [*bar, (-1, rest)], f"{peak:.2f}"))
    rows = []
    for part in [*union(plans), "measured peak"]:
        measured = peaks if part == "measured peak" else [found.get(part) for found in known]
        pairs = zip(plans, measured, strict=True)
        rows.append((part, *(cell for plan, gb in pairs for cell in (_gb(plan.get(part)), _gb(gb)))))
    names = [f"{run.name}, " if len(runs) > 1 else "" for run in runs]
    head = ("GB", *(f"{name}{what}" for name in names for what in ("planned", "measured")))
    key = (*enumerate(parts), (-1, "measured, not by part"))
    note = "GB at the highest point of a step"
    return Picture(
        "Plan and measured peak", note, pictures.stacks(*zip(*bars, strict=True)), Table(head, rows), key=key
    )


def in_gb(parts: dict[str, Any]) -> dict[str, float]:
    """Bytes as GB; what is no number is left out."""
    return {part: finite(size) / 1e9 for part, size in parts.items() if number_of(size) is not None}


def at_peak(plan: dict[str, float]) -> dict[str, float]:
    """The parts of a plan that are there at its peak: of those that come after each other, the largest alone."""
    if "peak" not in plan:
        return {}
    found = {part: gb for part, gb in plan.items() if part != "peak" and gb > 0}
    least = min("loss", "backward", key=lambda part: found.get(part, 0.0))
    found.pop(least, None)
    if sum(found.values()) > plan["peak"] * 1.001:  # the optimizer's moment is not that of the activations
        passing = {part for part in found if part in ("copies", "activations", "loss", "backward")}
        of_step = found.get("step", 0.0)
        gone = {"step"} if sum(found[part] for part in passing) >= of_step else passing
        found = {part: gb for part, gb in found.items() if part not in gone}
    rest = plan["peak"] - sum(found.values())
    return found | ({"other": rest} if rest > 0.001 * plan["peak"] else {})


def _gb(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3f}"
