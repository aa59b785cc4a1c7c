"""What is not drawn: samples, growth, settings, digests, and the commands that go on."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from typing import Any

from stack.config.continuing import flatten
from stack.observe.page.parts import Sample, Section, Table, number, union
from stack.observe.page.record import Record

SAMPLE_CHARACTERS = 4000
EARLIER_SAMPLES = 12


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
        section.tables.append(Table(("", "value"), plain, words=2, title=f"Facts{suffix}"))
        for key, values in lists.items():
            rows = [_cells(value) for value in values]
            if rows:
                width = max(map(len, rows))
                head = _head(values[0], width)
                padded = [row + ("",) * (width - len(row)) for row in rows]
                section.tables.append(Table(head, padded, width, f"{key.capitalize()}{suffix} ({len(rows)})",
                                            folded=len(rows) > 12))  # fmt: skip
    return section


def _head(first: Any, width: int) -> tuple[str, ...]:
    """Names of the columns: of entries with names, of ranges of ids, of tokens."""
    if isinstance(first, dict):
        return tuple(first)
    ranges = isinstance(first, list) and all(isinstance(cell, int) for cell in first)
    return ("from", "to") if ranges else ("id", "token", "was")[:width]


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
        keys = [key for key in union(settings) if key not in ("name", "runs_dir")]
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
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "[]"
    return str(value)


def settings(runs: Sequence[Record]) -> Section:
    """The whole configuration by group, and what was made from what."""
    section = Section("settings", "Configuration and digests")
    names = tuple(run.name for run in runs)
    made = [_made_from(run) for run in runs]
    keys = union(made)
    rows = [(key, *(found.get(key, "—") for found in made)) for key in keys]
    section.tables.append(Table(("", *names), rows, len(runs) + 1, "Made from"))
    for run in runs:
        saved = [(name, _metric(m.metric), f"{sum(f.size for f in m.files.values()) / 1e6:,.1f} MB",
                  m.files["model.safetensors"].sha256) for name, m in run.manifests.items()]  # fmt: skip
        if saved:
            title = "Checkpoints" + (f", {run.name}" if len(runs) > 1 else "")
            head = ("folder", "validation", "size", "SHA-256 of model.safetensors")
            section.tables.append(Table(head, saved, words=4, title=title))
    groups = union(run.config for run in runs)
    scalars = [group for group in groups if not isinstance(runs[0].config.get(group), dict)]
    for title, members in [("run", scalars)] + [(group, [group]) for group in groups if group not in scalars]:
        flat = [flatten({key: run.config[key] for key in members if key in run.config}) for run in runs]
        rows = [(key, *(_setting(found, key) for found in flat)) for key in union(flat)]
        section.tables.append(Table(("setting", *names), rows, len(runs) + 1, title, folded=True))
    return section


def _metric(value: float | None) -> str:
    return "—" if value is None else f"{value:.4f}"


def last_step(run: Record) -> str | None:
    """When the last step was."""
    when = run.last("time/unix_s")
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when)) if isinstance(when, int | float) else None


def _made_from(run: Record) -> dict[str, str]:
    identity = dict(run.resolved.get("identity") or {})
    identity.pop("growth", None)
    rest = {key: value for key, value in run.resolved.items() if key not in ("identity", "command", "memory", "length")}
    found = flatten(identity) | flatten(rest) | {"last step": last_step(run)}
    return {key: _plain(value) for key, value in found.items() if value is not None}


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
            talk = f".venv/bin/python -m stack.chat {shlex.quote(f'checkpoint={run.folder}')}"
            section.commands.append((f"Talks to{suffix or ' it'}:", talk))
    names = ",".join(str(run.folder) for run in runs)
    again = shlex.quote(f"runs=[{names}]")
    section.commands.append(("Writes this page again:", f".venv/bin/python -m stack.report {again}"))
    return section
