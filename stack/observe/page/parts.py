"""What a page is put together from: tables, pictures with their tables, sections; and the curves that most are.

A section stands where its keys are in the record and is left out where they are not. Keys are found by prefix, so a
new source, class or part of memory is drawn without a word here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stack.observe.page import pictures
from stack.observe.page.pictures import Line
from stack.observe.page.record import Record, Series, number_of

ROWS_OF_A_TABLE = 24  # of a picture's own; metrics.jsonl has all
TITLES = {
    "train/loss": ("Training loss", "nats per token"),
    "optim/grad_norm": ("Gradient norm", "before clipping"),
    "optim/lr": ("Learning rate", "peak × schedule"),
    "throughput/tokens_per_s": ("Throughput", "tokens per second"),
    "throughput/waiting_share": ("Waiting for data", "share of a step"),
    "time/step_s": ("Time of a step", "seconds"),
    "memory/peak_gb": ("Peak memory so far", "GB"),
    "eval/loss": ("Validation loss", "nats per token"),
    "eval/bits_per_byte": ("Bits per byte", "held-out text"),
}


@dataclass(frozen=True)
class Table:
    """Texts in rows; the columns from ``words`` on are numbers."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int = 1
    title: str = ""
    folded: bool = False  # shown on demand
    first: int = 0  # rows that are shown at once, the rest on demand; 0: all


@dataclass(frozen=True)
class Picture:
    """A drawing, what it shows in words, and its numbers."""

    title: str
    note: str  # unit and what the marks mean
    svg: str
    table: Table
    tall: str = ""  # another drawing of the same for narrow windows
    key: tuple[tuple[int, str], ...] = ()  # colour and name, where the drawing itself has no room for names

    @property
    def description(self) -> str:
        """For those who do not see it."""
        return f"{self.title}, {self.note}. The numbers are in the table below it."


@dataclass(frozen=True)
class Sample:
    """One prompt and what runs made of it: ``(label, text)``."""

    prompt: str
    texts: list[tuple[str, str]]


@dataclass
class Section:
    """A part of the page."""

    id: str
    title: str
    lead: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    earlier: list[Sample] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)  # what it does, and the command

    def __bool__(self) -> bool:
        return bool(self.pictures or self.tables or self.samples or self.commands)


def number(value: Any) -> str:
    """A figure as people read it: four digits that count, thousands set apart."""
    found = number_of(value)
    if found is None:
        return "" if value is None else str(value)
    if not math.isfinite(found):
        return str(value)
    return f"{found:,.0f}" if abs(found) >= 1000 or found == int(found) else f"{found:.4g}"


def finite(value: Any) -> float:
    """A number, NaN in the place of anything else."""
    found = number_of(value)
    return math.nan if found is None else found


def union(parts: Iterable[Iterable[str]]) -> list[str]:
    """Every name once, in the order of its first appearance."""
    return list(dict.fromkeys(name for part in parts for name in part))


def add(section: Section, picture: Picture | None) -> None:
    """Adds a picture, where there is one."""
    if picture is not None:
        section.pictures.append(picture)


def titled(key: str) -> tuple[str, str]:
    """Title and unit of a key."""
    if key in TITLES:
        return TITLES[key]
    name = key.split("/", 1)[-1]
    unit = "GB" if name.endswith("_gb") else "seconds" if name.endswith("_s") else "share" if "share" in name else ""
    return re.sub(r"_(gb|s)$", "", name).replace("_", " ").replace("/", " ").capitalize(), unit or key


def curve(
    title: str,
    note: str,
    found: Sequence[tuple[str, Series]],
    *,
    zero: bool = False,
    log: bool = False,
    colours: Sequence[int] | None = None,
) -> Picture | None:
    """Curves of several series over tokens; None where not one has two finite points.

    ``zero``: the axis begins at 0. ``log``: it is logarithmic where values of unlike size would hide each other.
    ``colours``: of each series, where a colour stands for a name on more than one picture.
    """
    numbered = zip(range(len(found)) if colours is None else colours, found, strict=True)
    shown = [(colour, label, s) for colour, (label, s) in numbered if np.isfinite(s.value).sum() >= 2]
    if not shown:
        return None
    kept = [(label, s) for _, label, s in shown]
    lines = [curve_line(label, s, colour, band=len(kept) == 1) for colour, label, s in shown]
    seen = np.concatenate([s.value[np.isfinite(s.value)] for _, s in kept])
    log = log and seen.min() > 0 and seen.max() > 50 * seen.min()
    note = ", ".join(filter(None, (note, "over tokens", "logarithmic" if log else "")))
    return Picture(title, note, pictures.curves(lines, zero=zero, log=log), table_of(kept))


def curve_line(label: str, s: Series, colour: int, *, band: bool, dots: bool = False) -> Line:
    """A series as a curve: a long one by means, with a band of lowest and highest where ``band`` asks for it."""
    x, mean, low, high = pictures.thin(s.tokens, s.value)
    return Line(label, x, mean, colour, ((low, high),) if band and is_thinned(s) else (), dots)


def is_thinned(s: Series) -> bool:
    """True where a curve is drawn by means of several steps."""
    return len(s.value) > 2 * pictures.BINS


def table_of(found: Sequence[tuple[str, Series]]) -> Table:
    """Evenly spread rows of a picture's series; one column a series where they share their steps."""
    steps = sorted({int(step) for _, s in found for step in s.step})
    kept = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), ROWS_OF_A_TABLE))})
    at = [dict(zip(s.step.astype(int), s.value, strict=True)) for _, s in found]
    tokens = {int(step): t for _, s in found for step, t in zip(s.step, s.tokens, strict=True)}
    rows = [(f"{k:,}", f"{tokens[k]:,.0f}", *(number(values.get(k)) for values in at)) for k in kept]
    title = f"{len(kept)} of {len(steps):,} steps; metrics.jsonl has all" if len(kept) < len(steps) else ""
    return Table(("step", "tokens", *(label or "value" for label, _ in found)), rows, words=0, title=title)


def over(runs: Sequence[Record], key: str, alone: str = "") -> list[tuple[str, Series]]:
    """One key of every run, labelled by run where there are several."""
    return [(run.name if len(runs) > 1 else alone, run.series(key)) for run in runs]


def dots(runs: Sequence[Record], title: str, note: str, names: dict[str, str], *, unit: bool = False) -> Picture:
    """The newest values of several keys as dots, one row a key."""
    values = [[finite(run.last(key)) for key in names.values()] for run in runs]
    texts = [f"{v * 100:.0f}\u202f%" if unit else f"{v:.3f}" for v in values[0]]
    rows = [(name, *(number(run.last(key)) for run in runs)) for name, key in names.items()]
    svg = pictures.dots(list(names), values, texts, unit=unit)
    head = ("", *(run.name for run in runs)) if len(runs) > 1 else ("", "value")
    key = tuple((i, run.name) for i, run in enumerate(runs)) if len(runs) > 1 else ()
    return Picture(title, note, svg, Table(head, rows), key=key)
