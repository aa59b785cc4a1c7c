"""What happens to the rows of the table, and which of them look undertrained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from stack.observe.audit import SHOWN
from stack.observe.page import pictures
from stack.observe.page.parts import Picture, Section, Table, add, curve, finite, number, over, table_of, union
from stack.observe.page.pictures import Histogram, Line
from stack.observe.page.record import AuditRow, Record
from stack.vocabulary.classes import CLASSES  # each has its colour

AT_ONCE = 15  # rows of the audit that are shown before more are asked for
LOOKS = {
    "norm": ("Norm of the rows", ""),
    "distance": ("Distance from the mean row", ""),
    "grad_input": ("Gradient of a row, input path", "norm before clipping"),
    "grad_output": ("Gradient of a row, output path", "norm before clipping"),
    "second_moment": ("Second moment of a row", "mean of AdamW's exp_avg_sq"),
    "update_ratio": ("Update of a row over its norm", ""),
    "mass": ("Probability given to the rows of a class", "mean over positions"),
    "mean_norm": ("Norm of the mean row", ""),
}
TOGETHER = {  # scalars of one picture: title, note, and a label for each
    ("anisotropy", "anisotropy_centred"): (
        "Anisotropy", "share of the first direction in all squares", ("as it is", "centred")),
    ("grad_input_norm", "grad_output_norm"): (
        "Gradient of the table by path", "norm before clipping", ("input", "output")),
    ("never_updated", "never_input"): (
        "Rows that nothing has reached", "number of rows", ("no update", "never an input")),
}  # fmt: skip
STATISTICS = {"min": 0.0, "max": 100.0, "mean": math.nan}  # others are quantiles, p05 or q05


def table_rows(runs: Sequence[Record]) -> Section:
    """The table's rows: quantiles over time, medians by class, whatever else is logged of them, and histograms."""
    section = Section("rows", "The table's rows")
    keys = [key.removeprefix("rows/") for key in union(run.names("rows/") for run in runs)]
    counts = {
        key.removeprefix("count_"): number(runs[0].last(f"rows/{key}")) for key in keys if key.startswith("count_")
    }
    if counts and len(runs) == 1:
        section.lead = "Rows by class: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n != "0") + "."
    families = families_of([key for key in keys if not key.startswith("count_")])
    for base, classes in families.items():
        title, note = LOOKS.get(base, (base.replace("_", " ").capitalize(), ""))
        whole = classes.get("all", {})
        if len(runs) == 1 and min(whole, default=50) < 50 < max(whole, default=50):
            add(section, _fan(runs[0], title, whole))
            classes = {name: found for name, found in classes.items() if name != "all"}
        if len(runs) == 1 and classes:
            colours = [CLASSES.index(name) if name in CLASSES else -1 for name in classes]
            if len(classes) == 1:
                colours = [0]
            of_class = [("all rows" if name == "all" else name, runs[0].series(f"rows/{middle(found)}"))
                        for name, found in classes.items()]  # fmt: skip
            what = "median of each class" if any(50.0 in found and len(found) > 1 for found in classes.values()) else ""
            of = f"{title} by class" if len(of_class) > 1 and base in LOOKS and base != "mass" else title
            add(section, curve(of, ", ".join(filter(None, (note, what))), of_class, log=True, colours=colours))
        if len(runs) > 1 and whole:
            add(section, curve(title, note, over(runs, f"rows/{middle(whole)}"), log=True))
    for names, (title, note, labels) in TOGETHER.items():
        if len(runs) == 1 and any(name in keys for name in names):
            series = [(label, runs[0].series(f"rows/{name}")) for name, label in zip(names, labels, strict=True)]
            add(section, curve(title, note, series, zero=True))
    for key in keys:
        add(section, _histogram(runs, f"rows/{key}"))
    return section


def families_of(keys: list[str]) -> dict[str, dict[str, dict[float, str]]]:
    """``WHAT_STATISTIC_CLASS`` → ``{WHAT: {CLASS: {percent: key}}}``; the class ``all`` has no name in the key.

    What is no statistic stands under 50 percent. Scalars that are drawn together, and counts of what is not finite,
    are left out.
    """
    together = {name for names in TOGETHER for name in names}
    found: dict[str, dict[str, dict[float, str]]] = {}
    for key in keys:
        words = key.replace("/", "_").split("_")
        row_class = words.pop() if words[-1] in CLASSES and len(words) > 1 else "all"
        percent = 50.0
        if len(words) > 1 and (match := re.fullmatch(r"[pq](\d+(?:\.\d+)?)", words[-1])):
            percent = float(match[1])
            words.pop()
        elif len(words) > 1 and words[-1] in STATISTICS:
            percent = STATISTICS[words.pop()]
        if key not in together and words[-1] != "nonfinite":
            found.setdefault("_".join(words), {}).setdefault(row_class, {})[percent] = key
    order = [*(base for base in LOOKS if base in found), *(base for base in found if base not in LOOKS)]
    return {base: found[base] for base in order}


def middle(quantiles: dict[float, str]) -> str:
    """The key of the quantile nearest to the median; a mean where there is nothing else."""
    return quantiles[min(quantiles, key=lambda q: math.inf if math.isnan(q) else abs(q - 50))]


def _fan(run: Record, title: str, quantiles: dict[float, str]) -> Picture | None:
    """The median as a line, pairs of quantiles around it as shades."""
    order = sorted(q for q in quantiles if math.isfinite(q))
    found = {q: run.series(f"rows/{quantiles[q]}") for q in order}
    at = found[min(order, key=lambda q: abs(q - 50))]
    if np.isfinite(at.value).sum() < 2 or len({len(s.value) for s in found.values()}) > 1:
        return None
    x, y, *_ = pictures.thin(at.tokens, at.value)
    pairs = [(q, 100 - q) for q in order if q < 50 and 100 - q in found]
    bands = tuple(tuple(pictures.thin(found[q].tokens, found[q].value)[1] for q in pair) for pair in pairs)
    shades = ", ".join("least\u2013largest" if low == 0 else f"{low:g}\u2013{high:g}\u202f%" for low, high in pairs)
    svg = pictures.curves([Line("", x, y, 0, bands)])
    return Picture(title, f"median; shades: {shades}; over tokens", svg,
                   table_of([(f"{q:g} %", s) for q, s in found.items()]))  # fmt: skip


def _histogram(runs: Sequence[Record], key: str) -> Picture | None:
    """``{"counts": […], "edges": […]}``: of one run at its first and newest step, of several at their newest."""
    found: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        seen = [(row["step"], row[key]) for row in run.rows if _is_histogram(row.get(key))]
        kept = seen[-1:] if len(runs) > 1 else [*seen[:1], *seen[1:][-1:]]
        found += [(run.name if len(runs) > 1 else f"step {step:,}", value) for step, value in kept]
    if not found:
        return None
    drawn = [Histogram(label, np.array(v["counts"], dtype=float), np.array(v["edges"], dtype=float),
                       i if len(runs) > 1 else 0 if i == len(found) - 1 else 1)
             for i, (label, v) in enumerate(found)]  # fmt: skip
    rows = [(label, number(v["edges"][i]), number(v["edges"][i + 1]), number(count))
            for label, v in found for i, count in enumerate(v["counts"]) if count]  # fmt: skip
    name = key.removeprefix("rows/").replace("_", " ").replace("/", " ")
    name = re.sub(r" histogram$", "", name)
    title = LOOKS.get(name.replace(" ", "_"), (name.capitalize(), ""))[0]
    note = "number of rows by log10 of it" if name.startswith("grad") else "number of rows by value"
    table = Table(("", "from", "to", "count"), rows)
    return Picture(title, note, pictures.histograms(drawn), table)


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, dict) or not {"counts", "edges"} <= value.keys() or not value["counts"]:
        return False
    numbers = [*value["counts"], *value["edges"]]
    return len(value["edges"]) == len(value["counts"]) + 1 and all(math.isfinite(finite(v)) for v in numbers)


def audit(runs: Sequence[Record]) -> Section:
    """The rows that look undertrained, worst first."""
    section = Section(
        "audit",
        "Rows that look undertrained",
        "Lowest indicator first, nearest rows by cosine. What no text can train is left out.",
    )
    head = ("id", "token", "nearest", "occurrences", "norm", "indicator")
    for run in runs:
        shown = sorted(run.audit, key=lambda row: row.indicator)[:SHOWN]
        if shown:
            title = run.name if len(runs) > 1 else ""
            section.tables.append(Table(head, list(map(_audited, shown)), words=3, title=title, first=AT_ONCE))
    return section


def _audited(row: AuditRow) -> tuple[str, ...]:
    known = "unknown" if row.occurrences is None else f"{row.occurrences:,}"
    return (str(row.id), row.token, row.nearest, known, number(row.norm), number(row.indicator))
