"""A run's folder: who may work in it, which settings it was started with, and where it goes on.

``runs/NAME`` holds ``config.yaml``, ``metrics.jsonl``, ``.lock`` and ``checkpoints/``. One live job a folder: the
lock is the kernel's, so it goes when its holder dies, however it dies. Everything here is done by rank 0.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stack import checkpoint
from stack.config import LENGTHS, Run, UserError, plain
from stack.distributed import Ranks

# What may change when a run goes on: who computes and how it is shown, when something is looked at, and a later end.
# Anything else would make a run that no single configuration describes.
FREE = (
    "name",  # a folder may be renamed
    "resume",
    "runs_dir",
    "data_dir",
    "device",
    "compile",
    "parallel",
    "track",
    "sample",
    "checkpoint",
    "evaluate",
    "diagnostics",
    "train.micro_batch",
    "train.max_bad_steps",
    "data.workers",
    "chat.workers",
    "sft.show",
    "sft.answers",
    "sft.answer_tokens",
    *(f"train.{key}" for key in LENGTHS),
)


@dataclass(frozen=True)
class Start:
    """Where a run goes on; JSON values, so that rank 0 can tell the others."""

    checkpoint: str | None = None  # whose weights and moments come first
    branched: bool = False  # that one is another run's
    step: int = 0  # of it
    num_rows: int | None = None  # of its table
    vocabulary: str | None = None  # digests of what it was trained with
    packed: str | None = None
    steps: int | None = None  # the end, where an earlier start fixed it and the length asked for is the same

    @property
    def finished(self) -> bool:
        """True where nothing is left to do."""
        return self.steps is not None and not self.branched and self.step >= self.steps


def folder_of(config: Run) -> Path:
    """``runs/NAME``."""
    return Path(config.runs_dir) / config.name


def names(runs_dir: Path) -> str:
    """The runs in a folder, for a message; ``none`` where there is none."""
    return ", ".join(sorted(path.parent.name for path in runs_dir.glob("*/config.yaml"))) or "none"


@contextmanager
def locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Rank 0 holds ``folder/.lock``; :class:`UserError` with the host and process of the job that has it already."""
    with ExitStack() as held:
        ranks.on_main(lambda: _lock(folder, held))
        yield


def _lock(folder: Path, held: ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = held.enter_context(open(folder / ".lock", "a+"))  # noqa: SIM115  closed, and so unlocked, by locked()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"another job is at work in {folder}: {file.read().strip() or 'it has not said which'}; "
            "wait for it, stop it, or give this one its own folder with name=…"
        ) from None
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}\n")
    file.flush()


def start_of(folder: Path, config: Run, show: Callable[[str], None], branch: str | None = None) -> Start:
    """The checkpoint to go on from: ``resume=``, else the newest good one here, else ``branch``, else none.

    Raises:
        UserError: settings changed that must not, or the checkpoint that is asked for is not there or not whole.
    """
    saved = read_config(folder)
    if saved is not None:
        _check_unchanged(folder, saved, config)
    own = folder / "checkpoints"
    path = checkpoint.newest(own, show) if config.resume is None and own.exists() else None
    if config.resume is not None:
        path = Path(config.resume)
        if path.resolve().parent != own.resolve():
            raise UserError(
                f"resume={path} is not a checkpoint of this run ({own}/step-…); "
                "to start a new run from another one's checkpoint use branch=…"
            )
    branched = path is None and branch is not None
    if branched:
        path = Path(str(branch))
    # The newest good one has been verified; what a flag names has not.
    manifest_of = checkpoint.verify if branched or config.resume is not None else checkpoint.read_manifest
    manifest = None if path is None else manifest_of(path)
    same_length = saved is not None and saved["resolved"]["length"] == _length(config)
    return Start(
        checkpoint=None if path is None else str(path),
        branched=branched,
        step=0 if manifest is None else manifest.step,
        num_rows=None if manifest is None else manifest.num_rows,
        vocabulary=None if manifest is None else manifest.vocabulary_digest,
        packed=None if manifest is None else manifest.identity.get("packed"),
        steps=saved["resolved"]["steps"] if saved is not None and same_length else None,
    )


def begin(folder: Path, config: Run, start: Start, resolved: dict[str, Any], show: Callable[[str], None]) -> None:
    """The moment before the first step: ``config.yaml`` is written, and what ``resume=`` goes back behind set aside.

    ``resolved`` is what was fixed from the settings; ``steps`` is the end.
    """
    own = folder / "checkpoints"
    later = [path for path in own.glob("step-*") if start.checkpoint and path.name > Path(start.checkpoint).name]
    if config.resume is not None and later:
        aside = next(p for n in itertools.count(1) if not (p := folder / f"checkpoints.discarded-{n}").exists())
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        show(f"going back to step {start.step}: {len(later)} later checkpoints are moved to {aside}")
    resolved = resolved | {"length": _length(config)}
    text = yaml.safe_dump({**plain(config), "resolved": resolved}, sort_keys=False, allow_unicode=True)
    beside = folder / ".config.yaml.partial"
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, folder / "config.yaml")


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.yaml``: the settings, and under ``resolved`` what was fixed from them; None where there is none yet."""
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        values["resolved"]["steps"], values["resolved"]["length"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); restore it, or start anew with name=…") from error
    return values


def _length(config: Run) -> dict[str, Any]:
    return {key: getattr(config.train, key) for key in LENGTHS}


def _check_unchanged(folder: Path, saved: dict[str, Any], config: Run) -> None:
    """Raises :class:`UserError` with every setting that must not change between two starts of a run and did."""
    before = flatten({key: value for key, value in saved.items() if key != "resolved"})
    now = flatten(plain(config))
    changed = [
        f"  {key}: the run has {before.get(key)!r}, now asked for {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == f or key.startswith(f + ".") for f in FREE)
    ]
    if changed:
        raise UserError(
            f"the run in {folder} was started with other settings:\n" + "\n".join(changed) + "\n"
            "give the same ones to go on; or start a new run from a checkpoint of this one with "
            f"name=NEW branch={folder}/checkpoints/step-…; or start from nothing with name=NEW"
        )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` → ``{"a.b": 1}``; an empty dictionary stays a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
