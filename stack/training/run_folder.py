"""A run's folder: who may work in it, which settings it was started with, and where it goes on.

``runs/NAME`` holds ``config.yaml``, ``metrics.jsonl``, ``.lock`` and ``checkpoints/``, and of a fine-tuning
``questions.json``. One live job a folder: the lock is the kernel's, so it goes when its holder dies, however it dies.
Everything here is done by rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stack import checkpoint
from stack.config.continuing import changes, check_unchanged, complete
from stack.config.schema import LENGTHS, Config, FineTune, Run, plain
from stack.core import files, locks
from stack.core.errors import UserError
from stack.core.ranks import Ranks

MADE_OF = ("data", "tokenizer")  # settings that decide what pretraining learns from


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on; JSON values, so that rank 0 can tell the others."""

    checkpoint: str | None = None  # whose weights and moments come first
    branched: bool = False  # that one is another run's
    step: int = 0  # of it
    num_rows: int | None = None  # of its table
    vocabulary: str | None = None  # digests of what it was trained with
    packed: str | None = None
    packed_folder: str | None = None  # where these data were
    branch: str | None = None  # the checkpoint that the run began from, where it is a branch
    begun: bool = False  # an earlier start came to the first step
    steps: int | None = None  # the end, where an earlier start fixed it and the length asked for is the same

    @property
    def finished(self) -> bool:
        """True where nothing is left to do."""
        return self.steps is not None and not self.branched and self.step >= self.steps

    @property
    def resumed(self) -> bool:
        """True where the checkpoint is the run's own, so that tokenizer and data are the ones that it names.

        A fine-tuning that was stopped before its first step has only its grown base, and makes that again.
        """
        return self.checkpoint is not None and not self.branched and (self.begun or self.step > 0)


FRESH = ResumePoint()  # of a run that begins from nothing


def folder_of(config: Run) -> Path:
    """``runs/NAME``."""
    return Path(config.runs_dir) / config.name


def names(runs_dir: Path) -> str:
    """The runs in a folder, for a message; ``none`` where there is none."""
    return ", ".join(sorted(path.parent.name for path in runs_dir.glob("*/config.yaml"))) or "none"


@contextmanager
def locked(folder: Path, ranks: Ranks, show: Callable[[str], None] = print) -> Iterator[None]:
    """Rank 0 holds ``folder/.lock``; :class:`UserError` with the host and process of the job that has it already.

    ``show`` hears what the file system does not offer.
    """
    with ExitStack() as held:
        ranks.on_main(lambda: _lock(folder, held, show))
        yield


def _lock(folder: Path, held: ExitStack, show: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (other := locks.take(folder / ".lock", held, show)) is not None:
        raise UserError(
            f"another job is at work in {folder}: {other}; "
            "wait for it, stop it, or give this one its own folder with name=…"
        )
    if not (files.sync_path(folder) and files.sync_path(folder / ".lock")):
        show(
            f"{folder} is on a file system that cannot be told to write to the disk: a power cut may cost a checkpoint"
        )


def start_of(folder: Path, config: Run, show: Callable[[str], None], branch: str | None = None) -> ResumePoint:
    """The checkpoint to go on from: ``resume=``, else the newest good one here, else ``branch``, else none.

    Raises:
        UserError: settings changed that must not, the checkpoint that is asked for is not there or not whole, or a run
            that had checkpoints has no good one any more.
    """
    saved = read_config(folder)
    if saved is not None:
        check_unchanged(folder, saved, config, show)
    path = _newest(folder, show) if config.resume is None else _asked_for(folder, config.resume)
    branched = path is None and branch is not None
    if branched:
        path = unlinked(Path(str(branch)).expanduser())
    # The newest good one has been verified; what a flag names has not.
    manifest_of = checkpoint.verify if branched or config.resume is not None else checkpoint.read_manifest
    manifest = None if path is None else manifest_of(path)
    identity = {} if manifest is None else manifest.identity
    same_length = saved is not None and _given(saved["resolved"]["length"]) == _given(_length(config))
    return ResumePoint(
        checkpoint=None if path is None else str(path),
        branched=branched,
        step=0 if manifest is None else manifest.step,
        num_rows=None if manifest is None else manifest.num_rows,
        vocabulary=None if manifest is None else manifest.vocabulary_digest,
        packed=identity.get("packed"),
        packed_folder=identity.get("packed_folder"),
        branch=str(path) if branched else identity.get("branch"),
        begun=saved is not None,
        steps=saved["resolved"]["steps"] if saved is not None and same_length else None,
    )


def unlinked(path: Path) -> Path:
    """What a link leads to, as the link may lead elsewhere tomorrow; any other path as it is."""
    return path.resolve() if path.is_symlink() else path


def _asked_for(folder: Path, resume: str) -> Path:
    """The checkpoint of this run that ``resume=`` means, under its own name though a link may have led there."""
    own, found = folder / "checkpoints", Path(resume).expanduser().resolve()
    if found.parent != own.resolve():
        raise UserError(
            f"resume={resume} is not a checkpoint of this run ({own}/step-…); "
            "to start a new run from another one's checkpoint use branch=…"
        )
    return own / found.name


def _newest(folder: Path, show: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint; None where none was ever saved, which is told where steps were taken.

    UserError where there were some: to begin at step 0 beside them is nothing to be done in silence.
    """
    own = folder / "checkpoints"
    found = checkpoint.newest(own, show) if own.exists() else None
    if found is not None:
        return found
    bad = checkpoint.steps(own)
    aside = [path for parent in sorted(folder.glob("checkpoints.discarded-*")) for path in checkpoint.steps(parent)]
    if bad or aside:
        damaged = f"; damaged: {', '.join(path.name for path in bad)}" if bad else ""
        set_back = f"; set aside by resume=: {', '.join(map(str, aside))}" if aside else ""
        raise UserError(
            f"{own} has no good checkpoint to go on from{damaged}{set_back}; "
            f"{'move one of these back' if aside else 'restore one'}, or start anew with name=NEW"
        )
    record = folder / "metrics.jsonl"
    if record.exists() and record.stat().st_size:
        show(f"{folder} has steps behind it, but no checkpoint was saved: they are taken again from the start")
    return None


def begin(folder: Path, config: Run, start: ResumePoint, resolved: dict[str, Any], show: Callable[[str], None]) -> None:
    """The moment before the first step: ``config.yaml`` is written, and what ``resume=`` goes back behind set aside.

    ``resolved`` is what was fixed from the settings; ``steps`` is the end.
    """
    later = [path for path in checkpoint.steps(folder / "checkpoints") if checkpoint.step_of(path) > start.step]
    if config.resume is not None and later:
        aside = next(p for n in itertools.count(1) if not (p := folder / f"checkpoints.discarded-{n}").exists())
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        show(f"going back to step {start.step}: {len(later)} later checkpoints are moved to {aside}")
    resolved = resolved | {"length": _length(config)}
    text = yaml.safe_dump({**plain(config), "resolved": resolved}, sort_keys=False, allow_unicode=True)
    files.replace(folder / "config.yaml", text)


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.yaml``: the settings, and under ``resolved`` what was fixed from them; None where there is none yet.

    What an older version has not written has the value by which that version behaved.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        values["resolved"]["steps"], values["resolved"]["length"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); restore it, or start anew with name=…") from error
    complete(values, schema_of(values))
    return values


def schema_of(values: dict[str, Any]) -> type[Config] | type[FineTune]:
    """What the settings of a ``config.yaml`` are an instance of."""
    return FineTune if "base" in values else Config


def _length(config: Run) -> dict[str, Any]:
    return {key: getattr(config.train, key) for key in LENGTHS}


def _given(length: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in length.items() if value is not None}


def same_sources(folder: Path, config: Config) -> bool:
    """Whether the run in ``folder`` was asked to learn from what ``config`` asks for."""
    saved = read_config(folder)
    return saved is not None and not any(key.split(".")[0] in MADE_OF for key, *_ in changes(folder, saved, config))
