"""What a page shows of one run or several: pictures with their tables, and tables, section by section.

A section stands where its keys are in the record and is left out where they are not. Keys are found by prefix, so a
new source, class or part of memory is drawn without a word here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stack import pictures
from stack.pictures import Histogram, Line, short
from stack.record import AuditRow, Record, Series, number_of
from stack.run_folder import flatten
from stack.tracking import duration

ROWS_OF_A_TABLE = 24  # of a picture's own; metrics.jsonl has all
AUDITED = 100  # rows of the audit that are shown
SAMPLE_CHARACTERS = 4000
EARLIER_SAMPLES = 12
CLASSES = ("all", "never", "rare", "frequent", "reserved", "control", "added")  # of rows of the table
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
NOT_DRAWN = ("train/skipped_steps", "time/unix_s")


@dataclass(frozen=True)
class Table:
    """Texts in rows; the columns from ``words`` on are numbers."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int = 1
    title: str = ""
    folded: bool = False  # shown on demand


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


# ---------------------------------------------------------------------------------------------------- curves


def main_curve(runs: Sequence[Record]) -> Picture | None:
    """Training loss over tokens, with the validation of a single run as points."""
    keys = [("train/loss", "training")] + ([("eval/loss", "validation")] if len(runs) == 1 else [])
    found = [
        (label if len(runs) == 1 else run.name, run.series(key), key == "eval/loss")
        for run in runs
        for key, label in keys
    ]
    found = [entry for entry in found if np.isfinite(entry[1].value).any()]
    if not found:
        return None
    lines = [_line(label, s, i, band=not dots, dots=dots) for i, (label, s, dots) in enumerate(found)]
    note = "nats per token over tokens seen" + (
        "; line: mean of neighbouring steps, shade: their lowest and highest" if _is_thinned(found[0][1]) else ""
    )
    return Picture(
        "Loss",
        note,
        pictures.curves(lines, pictures.WIDE),
        _table_of([(label, s) for label, s, _ in found]),
        tall=pictures.curves(lines, pictures.TALL),
    )


def curve(title: str, note: str, found: Sequence[tuple[str, Series]], *, zero: bool = False) -> Picture | None:
    """Curves of several series over tokens; None where not one has two finite points."""
    kept = [(label, s) for label, s in found if np.isfinite(s.value).sum() >= 2]
    if not kept:
        return None
    lines = [_line(label, s, i, band=len(kept) == 1) for i, (label, s) in enumerate(kept)]
    return Picture(title, f"{note}, over tokens", pictures.curves(lines, zero=zero), _table_of(kept))


def _line(label: str, s: Series, colour: int, *, band: bool, dots: bool = False) -> Line:
    x, mean, low, high = pictures.thin(s.tokens, s.value)
    return Line(label, x, mean, colour, ((low, high),) if band and _is_thinned(s) else (), dots)


def _is_thinned(s: Series) -> bool:
    return len(s.value) > 2 * pictures.BINS


def _table_of(found: Sequence[tuple[str, Series]]) -> Table:
    """Evenly spread rows of a picture's series; one column a series where they share their steps."""
    steps = sorted({int(step) for _, s in found for step in s.step})
    kept = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), ROWS_OF_A_TABLE))})
    at = [dict(zip(s.step.astype(int), s.value, strict=True)) for _, s in found]
    tokens = {int(step): t for _, s in found for step, t in zip(s.step, s.tokens, strict=True)}
    rows = [(f"{k:,}", f"{tokens[k]:,.0f}", *(number(values.get(k)) for values in at)) for k in kept]
    title = f"{len(kept)} of {len(steps):,} steps; metrics.jsonl has all" if len(kept) < len(steps) else ""
    return Table(("step", "tokens", *(label or "value" for label, _ in found)), rows, words=0, title=title)


def _over(runs: Sequence[Record], key: str, alone: str = "") -> list[tuple[str, Series]]:
    """One key of every run, labelled by run where there are several."""
    return [(run.name if len(runs) > 1 else alone, run.series(key)) for run in runs]


# -------------------------------------------------------------------------------------------------- sections


def training(runs: Sequence[Record]) -> Section:
    """Learning rates, gradient norm, throughput, and whatever else is logged at each step."""
    section = Section("training", "Training")
    keys = _union(run.names() for run in runs)
    rates = [key for key in keys if key.startswith("optim/lr_")]
    if rates and len(runs) == 1:
        of_groups = [(key.removeprefix("optim/lr_"), runs[0].series(key)) for key in rates]
        _add(section, curve(*TITLES["optim/lr"], of_groups, zero=True))
    for key in rates if len(runs) > 1 else []:
        _add(section, curve(f"Learning rate, {key.removeprefix('optim/lr_')}", "peak × schedule", _over(runs, key),
                            zero=True))  # fmt: skip
    first = ["optim/grad_norm", "throughput/tokens_per_s", "time/step_s", "throughput/waiting_share"]
    more = [key for key in keys if key.startswith(("train/", "optim/", "throughput/", "growth/", "track/"))]
    for key in dict.fromkeys([k for k in first if k in keys] + more):
        if key not in (*rates, *NOT_DRAWN, "train/loss"):
            _add(section, curve(*_titled(key), _over(runs, key), zero=True))
    return section


def quality(runs: Sequence[Record]) -> Section:
    """Validation: by source, by position in the window, by length and class, and the tasks."""
    section = Section("quality", "Quality on held-out text")
    keys = _union(run.names("eval/") for run in runs)
    sources = [name for name in _union(map(_sources, runs)) if name]
    for base in ("bits_per_byte", "loss"):
        key = f"eval/{base}"
        title, note = TITLES[key]
        named = [s for s in sources if f"{key}_{s}" in keys]
        if named and len(runs) == 1:
            by_source = [(s, runs[0].series(f"{key}_{s}")) for s in named]
            _add(section, curve(f"{title} by source", note, by_source))
        _add(section, curve(title, note, _over(runs, key)))
        if named:
            _add(section, _last(runs, f"{title} by source", f"{note}, at the end", {s: f"{key}_{s}" for s in named}))
    for group, names in _groups_of_loss(keys, sources).items():
        title = {"at": "Loss by position in the window"}.get(group, f"Loss by {group}")
        _add(section, _last(runs, title, "nats per token, at the end", names))
    for check, names in _checks(keys, sources).items():
        _add(section, _last(runs, f"Answers: {check}", "share of held-out conversations, at the end", names, unit=True))
        if len(runs) == 1:
            over = [(source, runs[0].series(key)) for source, key in names.items()]
            _add(section, curve(f"Answers: {check}", "share of held-out conversations", over, zero=True))
    return section


def _groups_of_loss(keys: list[str], sources: list[str]) -> dict[str, dict[str, str]]:
    """``eval/loss_at_256`` and others that are no source: ``{group: {label: key}}`` by the first word."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        rest = key.removeprefix("eval/loss_")
        if rest == key or rest in sources:
            continue
        group, _, label = rest.partition("_")
        if not label:
            group, label = "kind", rest
        found.setdefault(group, {})[label.replace("_", " to " if label.replace("_", "").isdigit() else " ")] = key
    return found


def _checks(keys: list[str], sources: list[str]) -> dict[str, dict[str, str]]:
    """``eval/exact_sort`` and others that end in a source: ``{check: {source: key}}``."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        name = key.removeprefix("eval/")
        source = next((s for s in sources if name.endswith(f"_{s}")), None)
        check = name.removesuffix(f"_{source}")
        if source is not None and check not in ("loss", "bits_per_byte"):
            found.setdefault(check, {})[source] = key
    return found


def _sources(run: Record) -> list[str]:
    """The names that sources may have in this run's keys."""
    groups = [run.config.get(group) or {} for group in ("data", "chat")]
    named = [name for group in groups for name in (*(group.get("sources") or {}), "files", "hub")]
    return sorted(dict.fromkeys(named), key=len, reverse=True)  # the longest first: sort_numbers before numbers


def _last(runs: Sequence[Record], title: str, note: str, names: dict[str, str], *, unit: bool = False) -> Picture:
    """The newest values of several keys as dots, one row a key."""
    values = [[_finite(run.last(key)) for key in names.values()] for run in runs]
    texts = [f"{v:.0%}" if unit else f"{v:.3f}" for v in values[0]]
    rows = [(name, *(number(run.last(key)) for run in runs)) for name, key in names.items()]
    svg = pictures.dots(list(names), values, texts, unit=unit)
    head = ("", *(run.name for run in runs)) if len(runs) > 1 else ("", "value")
    key = tuple((i, run.name) for i, run in enumerate(runs)) if len(runs) > 1 else ()
    return Picture(title, note, svg, Table(head, rows), key=key)


def _finite(value: Any) -> float:
    found = number_of(value)
    return math.nan if found is None else found


def memory(runs: Sequence[Record]) -> Section:
    """What was planned, part by part, beside what was measured."""
    section = Section("memory", "Memory")
    planned = [_plan_of(run) for run in runs]
    parts = _union(planned)
    bars: list[tuple[str, list[tuple[int, float]], str]] = []
    for run, plan in zip(runs, planned, strict=True):
        suffix = f" {run.name}" if len(runs) > 1 else ""
        peak = _finite(run.last("memory/peak_gb"))
        if plan:
            stack = [(parts.index(part), plan[part]) for part in plan]
            bars.append((f"planned{suffix}", stack, f"{sum(plan.values()):.2f}"))
        if math.isfinite(peak):
            bars.append((f"measured{suffix}", [(-1, peak)], f"{peak:.2f}"))
    if any(planned):
        svg = pictures.stacks(*zip(*bars, strict=True))
        rows = [(part, *(f"{plan.get(part, 0):.3f}" for plan in planned)) for part in parts]
        peaks = [_finite(run.last("memory/peak_gb")) for run in runs]
        rows += [("measured peak", *(f"{peak:.3f}" if math.isfinite(peak) else "" for peak in peaks))]
        head = ("GB", *(run.name for run in runs)) if len(runs) > 1 else ("", "GB")
        key = (*enumerate(parts), (-1, "measured"))
        section.pictures.append(Picture("Plan and measured peak", "GB", svg, Table(head, rows), key=key))
    for name in _union(run.names("memory/") for run in runs):
        if not name.startswith("memory/plan_"):
            _add(section, curve(*_titled(name), _over(runs, name), zero=True))
    return section


def _plan_of(run: Record) -> dict[str, float]:
    """``memory/plan_PART_gb`` by part, without the sum."""
    found = {re.sub(r"_gb$", "", key.removeprefix("memory/plan_")): _finite(run.last(key))
             for key in run.names("memory/plan_")}  # fmt: skip
    return {part: gb for part, gb in found.items() if gb > 0 and part not in ("peak", "total", "free")}


def table_rows(runs: Sequence[Record]) -> Section:
    """The table's rows: quantiles by class over time, whatever is logged of them, and histograms."""
    section = Section("rows", "The table's rows")
    keys = _union(run.names("rows/") for run in runs)
    for base, classes in _families(keys).items():
        title = base.replace("_", " ").capitalize()
        if len(runs) > 1:
            key = _middle(classes.get("all") or next(iter(classes.values())))
            _add(section, curve(f"Rows: {title.lower()}", "", _over(runs, key)))
            continue
        fan = classes.get("all") or (next(iter(classes.values())) if len(classes) == 1 else None)
        if fan is not None and len(fan) > 1:
            _add(section, _fan(runs[0], title, fan))
        by_class = [(label or "value", runs[0].series(_middle(found))) for label, found in classes.items()]
        if len(classes) > 1 or fan is None or len(fan) == 1:
            quantiles = any(len(found) > 1 for found in classes.values())
            note = "median of each class" if quantiles else "by class" if len(classes) > 1 else "all rows"
            _add(section, curve(f"{title} by class" if len(classes) > 1 else title, note, by_class))
    for key in keys:
        _add(section, _histogram(runs, key))
    return section


_QUANTILE = re.compile(r"(?:q|p)_?(\d+(?:\.\d+)?)")
_EXTREMES = {"min": 0.0, "median": 50.0, "max": 100.0}


def _families(keys: list[str]) -> dict[str, dict[str, dict[float, str]]]:
    """``rows/norm_rare_q05`` → ``{"norm": {"rare": {5.0: key}}}``; what is no quantile stands under 50."""
    found: dict[str, dict[str, dict[float, str]]] = {}
    for key in keys:
        words = re.split(r"[/_]", key.removeprefix("rows/"))
        quantile = 50.0
        if match := _QUANTILE.fullmatch(words[-1]):
            quantile = float(match[1]) * (100 if "." in match[1] and float(match[1]) <= 1 else 1)
            words.pop()
        elif words[-1] in _EXTREMES:
            quantile = _EXTREMES[words.pop()]
        row_class = next((word for word in words if word in CLASSES), "all")
        base = "_".join(word for word in words if word != row_class) or "rows"
        found.setdefault(base, {}).setdefault(row_class, {})[quantile] = key
    return found


def _middle(quantiles: dict[float, str]) -> str:
    return quantiles[min(quantiles, key=lambda q: abs(q - 50))]


def _fan(run: Record, title: str, quantiles: dict[float, str]) -> Picture | None:
    """The middle quantile as a line, pairs of outer ones as shades."""
    order = sorted(quantiles)
    found = [(f"{q:g} %", run.series(quantiles[q])) for q in order]
    middle = run.series(_middle(quantiles))
    if np.isfinite(middle.value).sum() < 2 or len({len(s.value) for _, s in found}) > 1:
        return None
    thinned = [pictures.thin(s.tokens, s.value)[1] for _, s in found]
    x, y, *_ = pictures.thin(middle.tokens, middle.value)
    pairs = [(thinned[i], thinned[-1 - i]) for i in range(len(order) // 2)]
    shades = ", ".join(f"{order[i]:g} to {order[-1 - i]:g} %" for i in range(len(pairs)))
    svg = pictures.curves([Line("", x, y, 0, tuple(pairs))])
    note = f"line: median of all rows; shade: {shades}; over tokens"
    return Picture(title, note, svg, _table_of(found))


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
    name = re.sub(r"\b(hist|histogram)\b", "", name).strip() or "rows"
    table = Table(("", "from", "to", "count"), rows)
    return Picture(f"Histogram: {name}", "number of rows by value", pictures.histograms(drawn), table)


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, dict) or not {"counts", "edges"} <= value.keys() or not value["counts"]:
        return False
    numbers = [*value["counts"], *value["edges"]]
    return len(value["edges"]) == len(value["counts"]) + 1 and all(math.isfinite(_finite(v)) for v in numbers)


def audit(runs: Sequence[Record]) -> Section:
    """The rows that look undertrained, worst first."""
    section = Section("audit", "Rows that look undertrained", "Lowest indicator first; nearest rows by cosine.")
    head = ("id", "token", "nearest", "occurrences", "norm", "indicator")
    for run in runs:
        shown = sorted(run.audit, key=lambda row: row.indicator)[:AUDITED]
        if shown:
            title = run.name if len(runs) > 1 else ""
            section.tables.append(Table(head, list(map(_audited, shown)), words=3, title=title))
    return section


def _audited(row: AuditRow) -> tuple[str, ...]:
    known = "unknown" if row.occurrences is None else f"{row.occurrences:,}"
    return (str(row.id), row.token, row.nearest, known, number(row.norm), number(row.indicator))


def growth(runs: Sequence[Record]) -> Section:
    """What growth did to the table, as the manifest has it."""
    section = Section("growth", "Growth of the vocabulary")
    for run in runs:
        facts = run.growth
        if not facts:
            continue
        suffix = f", {run.name}" if len(runs) > 1 else ""
        lists = {key: value for key, value in facts.items() if isinstance(value, list)}
        plain = [(key.replace("_", " "), number(value)) for key, value in flatten(facts).items() if key not in lists]
        section.tables.append(Table(("", "value"), plain, title=f"Facts{suffix}"))
        for key, values in lists.items():
            rows = [_cells(value) for value in values]
            if rows:
                width = max(map(len, rows))
                head = tuple(values[0]) if isinstance(values[0], dict) else ("id", "token", "was")[:width]
                padded = [row + ("",) * (width - len(row)) for row in rows]
                section.tables.append(Table(head, padded, width, f"{key.capitalize()}{suffix} ({len(rows)})",
                                            folded=len(rows) > 12))  # fmt: skip
    return section


def _cells(value: Any) -> tuple[str, ...]:
    if isinstance(value, dict):
        return tuple(_range_of(cell) for cell in value.values())
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _range_of(value: Any) -> str:
    return " to ".join(map(str, value)) if isinstance(value, list) else str(value)


def samples(runs: Sequence[Record]) -> Section:
    """The newest texts by prompt, runs beside each other; the earlier ones of a single run."""
    section = Section("samples", "Samples")
    found = [(run, row) for run in runs for row in run.rows if row.get("samples/texts")]
    newest = {id(run): row for run, row in found}
    for run, row in found:
        late = newest[id(run)] is row
        label = run.name if len(runs) > 1 else f"step {row['step']:,}"
        for prompt, text in _split(run, row["samples/texts"]):
            _collect(section.samples if late else section.earlier, prompt, label, text)
    for sample in section.earlier:
        del sample.texts[:-EARLIER_SAMPLES]
    return section if section.samples else Section("samples", "Samples")


def _split(run: Record, texts: list[str]) -> list[tuple[str, str]]:
    prompts = [str(prompt) for prompt in (run.config.get("sample") or {}).get("prompts") or []]
    split = []
    for text in map(str, texts):
        prompt = max((p for p in prompts if text.startswith(p)), key=len, default="")
        rest = text[len(prompt) :]
        split.append((prompt, rest if len(rest) <= SAMPLE_CHARACTERS else rest[:SAMPLE_CHARACTERS] + " […]"))
    return split


def _collect(into: list[Sample], prompt: str, label: str, text: str) -> None:
    same = next((sample for sample in into if sample.prompt == prompt), None)
    if same is None:
        into.append(same := Sample(prompt, []))
    same.texts.append((label, text))


def differences(runs: Sequence[Record]) -> Section:
    """Settings that are not the same in every run."""
    section = Section("differences", "What differs")
    if len(runs) > 1:
        settings = [flatten(run.config) for run in runs]
        keys = [key for key in _union(settings) if key not in ("name", "runs_dir")]
        rows = [(key, *(_setting(s, key) for s in settings)) for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        section.lead = "" if rows else "Every setting is the same."
        table = Table(("setting", *(run.name for run in runs)), rows, words=len(runs) + 1)
        section.tables.append(table)
    return section


def _setting(settings: dict[str, Any], key: str) -> str:
    return _plain(settings[key]) if key in settings else "—"


def _plain(value: Any) -> str:
    """A setting as YAML would have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def settings(runs: Sequence[Record]) -> Section:
    """The whole configuration by group, and what was made from what."""
    section = Section("settings", "Configuration and digests")
    names = tuple(run.name for run in runs)
    made = [_made_from(run) for run in runs]
    keys = _union(made)
    rows = [(key, *(found.get(key, "—") for found in made)) for key in keys]
    section.tables.append(Table(("", *names), rows, len(runs) + 1, "Made from"))
    for run in runs:
        saved = [(name, _metric(m.metric), f"{sum(f.size for f in m.files.values()) / 1e6:,.1f} MB",
                  m.files["model.safetensors"].sha256) for name, m in run.manifests.items()]  # fmt: skip
        if saved:
            title = "Checkpoints" + (f", {run.name}" if len(runs) > 1 else "")
            head = ("folder", "validation", "size", "SHA-256 of model.safetensors")
            section.tables.append(Table(head, saved, words=4, title=title))
    groups = _union(run.config for run in runs)
    scalars = [group for group in groups if not isinstance(runs[0].config.get(group), dict)]
    for title, members in [("run", scalars)] + [(group, [group]) for group in groups if group not in scalars]:
        flat = [flatten({key: run.config[key] for key in members if key in run.config}) for run in runs]
        rows = [(key, *(_setting(found, key) for found in flat)) for key in _union(flat)]
        section.tables.append(Table(("setting", *names), rows, len(runs) + 1, title, folded=True))
    return section


def _metric(value: float | None) -> str:
    return "—" if value is None else f"{value:.4f}"


def _made_from(run: Record) -> dict[str, str]:
    identity = dict(run.resolved.get("identity") or {})
    identity.pop("growth", None)
    rest = {key: value for key, value in run.resolved.items() if key not in ("identity", "command")}
    return {key: _plain(value) for key, value in (flatten(identity) | flatten(rest)).items()}


def going_on(runs: Sequence[Record]) -> Section:
    """The commands that go on from here."""
    section = Section("resume", "How to go on", "From the folder that the program was started in.")
    for run in runs:
        suffix = f" {run.name}" if len(runs) > 1 else ""
        command = run.resolved.get("command")
        if command:
            what = "Ends at once, as the run is finished" if run.step >= run.steps else "Goes on"
            section.commands.append((f"{what}:{suffix}", command))
            if run.step >= run.steps and run.config["train"].get("steps"):
                longer = re.sub(r" train\.steps=\S+", "", command) + f" train.steps={2 * run.steps}"
                section.commands.append((f"Goes on to a later end:{suffix}", longer))
        else:
            section.commands.append(
                (f"Goes on: the same command that started the run{suffix}, with", f"name={run.name}")
            )
        if run.newest is not None:
            talk = f".venv/bin/python -m stack.chat checkpoint={run.folder}"
            section.commands.append((f"Talks to{suffix or ' it'}:", talk))
    names = ",".join(str(run.folder) for run in runs)
    section.commands.append(("Writes this page again:", f".venv/bin/python -m stack.report runs='[{names}]'"))
    return section


def _titled(key: str) -> tuple[str, str]:
    if key in TITLES:
        return TITLES[key]
    name = key.split("/", 1)[-1]
    unit = "GB" if name.endswith("_gb") else "seconds" if name.endswith("_s") else "share" if "share" in name else ""
    return re.sub(r"_(gb|s)$", "", name).replace("_", " ").replace("/", " ").capitalize(), unit or key


def _add(section: Section, picture: Picture | None) -> None:
    if picture is not None:
        section.pictures.append(picture)


def _union(parts: Iterable[Iterable[str]]) -> list[str]:
    """Every name once, in the order of its first appearance."""
    return list(dict.fromkeys(name for part in parts for name in part))


SECTIONS: tuple[Callable[[Sequence[Record]], Section], ...] = (
    differences, quality, training, memory, table_rows, audit, growth, samples, settings, going_on,
)  # fmt: skip


def all_of(runs: Sequence[Record]) -> list[Section]:
    """The sections that have something to show."""
    return [section for make in SECTIONS if (section := make(runs))]


# ------------------------------------------------------------------------------------------- the five figures


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
    bits, loss = _finite(run.last("eval/bits_per_byte")), _finite(run.last("eval/loss"))
    if math.isfinite(bits):
        return Figure("Validation", f"{bits:.3f}", "bits per byte", f"{loss:.3f} nats per token")
    if math.isfinite(loss):
        return Figure("Validation", f"{loss:.3f}", "nats per token", _solved(run))
    losses = run.series("train/loss").value[-20:]
    if not np.isfinite(losses).any():
        return None
    return Figure("Training loss", f"{np.nanmean(losses):.3f}", "nats per token", f"mean of {len(losses)} steps")


def _solved(run: Record) -> str:
    shares = [_finite(run.last(key)) for key in run.names("eval/exact_")]
    return f"{np.nanmean(shares):.0%} of {len(shares)} tasks answered exactly" if shares else "held-out answers"


def _seen(run: Record) -> Figure | None:
    if not run.rows:
        return None
    return Figure("Tokens learnt", short(float(f"{run.tokens:.3g}")), "tokens", f"step {run.step:,} of {run.steps:,}")


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
    more = f"{np.nanmedian(waiting):.0%} waiting for data" if np.isfinite(waiting).any() else "median"
    return Figure("Throughput", number(float(f"{np.nanmedian(speed):.3g}")), "tokens/s", more)


def _peak(run: Record) -> Figure | None:
    peak = _finite(run.last("memory/peak_gb"))
    plan = sum(_plan_of(run).values())
    if not math.isfinite(peak):
        return None
    return Figure("Peak memory", f"{peak:.2f}", "GB", f"{plan:.2f} GB planned" if plan else "of one process")
