"""The loss, what each step logs, and what validation found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stack.observe.page import pictures
from stack.observe.page.parts import (
    TITLES,
    Picture,
    Section,
    add,
    curve,
    curve_line,
    dots,
    is_thinned,
    over,
    table_of,
    titled,
    union,
)
from stack.observe.page.record import Record

GROUPS = {  # of loss_GROUP_LABEL
    "at": "Loss by position in the document",
    "length": "Loss by length of the document",
    "class": "Loss by class of the token's row",
}
NOT_DRAWN = ("train/skipped_steps", "time/unix_s")


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
    lines = [
        curve_line(label, s, i, band=len(runs) == 1 and not points, dots=points)
        for i, (label, s, points) in enumerate(found)
    ]
    note = "nats per token over tokens seen" + (
        f"; line: mean of neighbouring steps{', shade: lowest and highest of them' * (len(runs) == 1)}"
        if is_thinned(found[0][1])
        else ""
    )
    return Picture(
        "Loss",
        note,
        pictures.curves(lines, pictures.WIDE),
        table_of([(label, s) for label, s, _ in found]),
        tall=pictures.curves(lines, pictures.TALL),
    )


def training(runs: Sequence[Record]) -> Section:
    """Learning rates, gradient norm, throughput, and whatever else is logged at each step."""
    section = Section("training", "Training")
    keys = union(run.names() for run in runs)
    rates = [key for key in keys if key.startswith("optim/lr_")]
    if rates and len(runs) == 1:
        of_groups = [(key.removeprefix("optim/lr_"), runs[0].series(key)) for key in rates]
        add(section, curve(*TITLES["optim/lr"], of_groups, zero=True))
    for key in rates if len(runs) > 1 else []:
        add(section, curve(f"Learning rate, {key.removeprefix('optim/lr_')}", "peak × schedule", over(runs, key),
                            zero=True))  # fmt: skip
    first = ["optim/grad_norm", "throughput/tokens_per_s", "time/step_s", "throughput/waiting_share"]
    more = [key for key in keys if key.startswith(("train/", "optim/", "throughput/", "growth/", "track/"))]
    for key in dict.fromkeys([k for k in first if k in keys] + more):
        if key not in (*rates, *NOT_DRAWN, "train/loss"):
            add(section, curve(*titled(key), over(runs, key), zero=True))
    return section


def quality(runs: Sequence[Record]) -> Section:
    """Validation: by source, by position in the window, by length and class, and the tasks."""
    section = Section("quality", "Quality on held-out text")
    keys = union(run.names("eval/") for run in runs)
    sources = [name for name in union(map(_sources, runs)) if name]
    for base in ("bits_per_byte", "loss"):
        key = f"eval/{base}"
        title, note = TITLES[key]
        named = [s for s in sources if f"{key}_{s}" in keys]
        if named and len(runs) == 1 and len(runs[0].series(key).step) > 1:
            by_source = [*((s, runs[0].series(f"{key}_{s}")) for s in named), ("all", runs[0].series(key))]
            add(section, curve(f"{title} by source", note, by_source, colours=[*range(len(named)), -1]))
            continue
        add(section, curve(title, note, over(runs, key)))
        if named:
            names = {s: f"{key}_{s}" for s in named}
            add(section, dots(runs, f"{title} by source", f"{note}, at the end", names))
    for group, names in _groups_of_loss(keys, sources).items():
        title = GROUPS.get(group, f"Loss by {group}")
        add(section, dots(runs, title, "nats per token, at the end", names))
    for check, names in _checks(keys, sources).items():
        what = "share of held-out conversations"
        if len(runs) == 1 and len(runs[0].series(next(iter(names.values()))).step) > 1:
            by_source = [(source, runs[0].series(key)) for source, key in names.items()]
            add(section, curve(f"Answers: {check}", what, by_source, zero=True))
        else:
            add(section, dots(runs, f"Answers: {check}", f"{what}, at the end", names, unit=True))
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
        found.setdefault(group, {})[_bucket(label)] = key
    return found


def _bucket(label: str) -> str:
    """``0032_0063`` → ``32 to 63``, ``1024`` → ``1,024 and more``."""
    words = label.split("_")
    if not all(word.isdigit() for word in words):
        return " ".join(words)
    numbers = [f"{int(word):,}" for word in words]
    return " to ".join(numbers) if len(numbers) > 1 else f"{numbers[0]} and more"


def _checks(keys: list[str], sources: list[str]) -> dict[str, dict[str, str]]:
    """``eval/exact_sort`` and others that end in a source: ``{check: {source: key}}``."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        name = key.removeprefix("eval/")
        source = max((s for s in sources if name.endswith(f"_{s}")), key=len, default=None)  # sort_numbers, not numbers
        check = name.removesuffix(f"_{source}")
        if source is not None and check not in ("loss", "bits_per_byte"):
            found.setdefault(check, {})[source] = key
    return found


def _sources(run: Record) -> list[str]:
    """The names that sources may have in this run's keys."""
    groups = [run.config.get(group) or {} for group in ("data", "chat")]
    named = [name for group in groups for name in (*(group.get("sources") or {}), "files", "hub")]
    return list(dict.fromkeys(named))
