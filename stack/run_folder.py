"""A run's folder: who may work in it, which settings it was started with, and where it goes on.

``runs/NAME`` holds ``config.yaml``, ``metrics.jsonl``, ``.lock`` and ``checkpoints/``. One live job a folder: the
lock is the kernel's, so it goes when its holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from stack import checkpoint
from stack.config import Config, UserError, plain
from stack.distributed import Ranks

# What may change when a run goes on: who computes and how it is shown, and a later end. Anything else would make
# a run that no single configuration describes.
FREE = (
    "resume",
    "branch",
    "runs_dir",
    "data_dir",
    "device",
    "compile",
    "parallel",
    "track",
    "sample",
    "checkpoint",
    "evaluate",
    "train.micro_batch",
    "train.max_bad_steps",
    "train.steps",
    "train.tokens",
    "train.minutes",
    "train.epochs",
    "data.workers",
)


@contextmanager
def locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Rank 0 holds ``folder/.lock``; :class:`UserError` with the host and process of the job that has it already."""
    with ExitStack() as held:
        ranks.on_main(lambda: _take(folder, held))
        yield


def _take(folder: Path, held: ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = held.enter_context(open(folder / ".lock", "a+"))
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


def write_config(folder: Path, config: Config, resolved: dict[str, Any]) -> None:
    """Writes ``config.yaml``: the settings, and under ``resolved`` what was fixed from them, as the number of steps."""
    text = yaml.safe_dump({**plain(config), "resolved": resolved}, sort_keys=False, allow_unicode=True)
    beside = folder / ".config.yaml.partial"
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, folder / "config.yaml")


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The settings and the resolved part of ``config.yaml``; None where the run has none yet."""
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return values, values.pop("resolved")
    except (yaml.YAMLError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; restore it, or start anew with name=…") from error


def check_unchanged(folder: Path, saved: dict[str, Any], config: Config) -> None:
    """Raises :class:`UserError` with every setting that must not change between two starts of a run and did."""
    before, now = flatten(saved), flatten(plain(config))
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


def start_point(folder: Path, config: Config, show: Any) -> Path | None:
    """The checkpoint to go on from: ``resume=``, else the newest good one here, else ``branch=``, else None."""
    own = folder / "checkpoints"
    if config.resume is not None:
        path = Path(config.resume)
        if path.resolve().parent != own.resolve():
            raise UserError(
                f"resume={config.resume} is not a checkpoint of this run ({own}/step-…); "
                "to start a new run from another one's checkpoint use branch=…"
            )
        _check_is_checkpoint(path, "resume")
        for later in sorted(own.glob("step-*")):
            if later.name > path.name:
                aside = folder / "checkpoints.discarded"
                aside.mkdir(exist_ok=True)
                show(f"going back to {path.name}: {later.name} is moved to {aside}")
                os.replace(later, aside / later.name)
        return path
    newest = checkpoint.newest(own, show) if own.exists() else None
    if newest is None and config.branch is not None:
        _check_is_checkpoint(Path(config.branch), "branch")
        return Path(config.branch)
    return newest


def _check_is_checkpoint(path: Path, flag: str) -> None:
    if not (path / "manifest.json").exists():
        raise UserError(f"{flag}={path}: there is no checkpoint (no manifest.json); give a folder runs/…/step-…")


def describe(config: Config) -> str:
    """One line about the shape of the run."""
    m, t = config.model, config.train
    return (
        f"{m.layers} layers × {m.d}, {m.heads}/{m.kv_heads} heads × {m.head_dim}, SwiGLU {m.ffn}; "
        f"{t.global_batch} windows × {t.window} tokens a step; seed {config.seed}"
    )
