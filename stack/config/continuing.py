"""The settings of a run at its next start: what an older version lacks, what changed, and what must not change."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stack.config.checks import keys_at
from stack.config.kinds import Before, Kind, bare, hint_of, hints, kind_of, marks_of, may_change
from stack.config.schema import Run, plain
from stack.core.errors import UserError


def befores(schema: type) -> dict[str, Any]:
    """Settings that came after the first runs, each with the value by which a version without it behaved.

    ``*`` stands for the name of a source. What is not among them must be a setting that may change, or no run of an
    older version would go on.
    """
    return dict(_befores(schema, ""))


def _befores(schema: type, above: str) -> Iterator[tuple[str, Any]]:
    for name, hint in hints(schema).items():
        yield from ((above + name, mark.value) for mark in marks_of(hint) if isinstance(mark, Before))
        inner, path = bare(hint), f"{above}{name}."
        if typing.get_origin(inner) is dict:
            inner, path = typing.get_args(inner)[1], f"{path}*."
        if dataclasses.is_dataclass(inner):
            yield from _befores(inner, path)


def complete(values: dict[str, Any], schema: type) -> None:
    """Fills in settings that ``values`` of an older version lack, with the values by which that version behaved."""
    for key, value in befores(schema).items():
        _complete(values, key.split("."), value)


def _complete(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets what lies at ``path`` where nothing does; ``*`` is every entry that is there."""
    if not isinstance(values, dict):
        return
    first, *rest = path
    if not rest:
        values.setdefault(first, value)
    for key in list(values) if first == "*" else [first] if rest else []:
        _complete(values.setdefault(key, {}), rest, value)


def check_unchanged(folder: Path, saved: dict[str, Any], config: Run, show: Callable[[str], None]) -> None:
    """Raises :class:`UserError` with every setting that must not change between two starts of a run and did.

    ``show`` hears of settings that there are no more.
    """
    before = _settings(saved)
    gone = {key: value for key, value in before.items() if not _known(key, type(config))}
    if gone:
        named = ", ".join(f"{key}={value!r}" for key, value in gone.items())
        show(f"{folder}/config.yaml has settings that this version does not know, and goes on without: {named}")
    changed = [
        f"  {key}: the run has {old}, now asked for {new!r}"
        for key, old, new in changes(folder, saved, config)
        if key not in gone and not may_change(type(config), key)
    ]
    if changed:
        raise UserError(
            f"the run in {folder} was started with other settings:\n" + "\n".join(changed) + "\n"
            "give the same ones to go on; or start a new run from a checkpoint of this one with "
            f"name=NEW branch={folder}/checkpoints/step-…; or start from nothing with name=NEW"
        )


def changes(folder: Path, saved: dict[str, Any], config: Run) -> list[tuple[str, str, Any]]:
    """The settings that differ between ``config.yaml`` of ``folder`` and ``config``: key, the saved value, the new one.

    Paths differ where they lead to different places.
    """
    before, now = _settings(saved), flatten(plain(config))
    started_in = _started_in(folder, saved)
    return [
        (key, repr(before[key]) if key in before else "no such setting", now.get(key))
        for key in sorted(before.keys() | now.keys())
        if not (key in before and key in now and before[key] == now[key])
        and not (_is_path(key, type(config)) and _same_path(before.get(key), now.get(key), started_in))
    ]


def _is_path(key: str, schema: type) -> bool:
    """Whether a setting is a path: two that lead to one place are one value."""
    return kind_of(hint_of(schema, key)) in (Kind.PATH, Kind.PATHS)


def _settings(saved: dict[str, Any]) -> dict[str, Any]:
    return flatten({key: value for key, value in saved.items() if key != "resolved"})


def _known(key: str, schema: type) -> bool:
    """Whether there is such a setting. What a source is called is free, with dots too."""
    *path, last = key.split(".")
    group, _, of_source = key.partition(".sources.")
    if of_source:
        return last in (*keys_at([group, "sources", "*"], schema), *keys_at([group, "sources", "*", "hub"], schema))
    return last in keys_at(path, schema)


def _started_in(folder: Path, saved: dict[str, Any]) -> Path:
    """The folder in which the run was started, as far as its place tells: ``runs_dir`` was relative to it."""
    place, runs_dir = Path(os.path.abspath(folder)), Path(saved["runs_dir"])
    above = place.parents[: len(runs_dir.parts) + 1]
    return Path() if runs_dir.is_absolute() or ".." in runs_dir.parts or not above else above[-1]


def _same_path(old: Any, new: Any, started_in: Path) -> bool:
    """Whether two paths, or two lists of them, lead to one place. A relative ``old`` is seen from either folder."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same_path(a, b, started_in) for a, b in zip(old, new, strict=True))
    if not isinstance(old, str) or not isinstance(new, str):
        return old == new
    place = os.path.realpath(os.path.expanduser(new))
    return place in {os.path.realpath(seen_from / os.path.expanduser(old)) for seen_from in (Path(), started_in)}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` → ``{"a.b": 1}``; an empty dictionary stays a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
