"""How an entry point starts: the command line is read, Hydra composes, the job runs, its end is an exit code."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from stack.config import arguments, command, sweep
from stack.config.arguments import CONF, Door, Given
from stack.config.checks import Schema, typed
from stack.config.grammar import quoted
from stack.config.sweep import Job
from stack.core.errors import EchoError, LostError, UserError
from stack.core.home import home
from stack.core.streams import forgiving

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)  # a person can mend it


@dataclass
class Entry:
    """What ``python -m stack.NAME`` does; see :func:`entry`."""

    door: Door
    job: Callable[[Any], int]
    compare: Callable[[Sequence[Job]], None] | None
    forgives: bool
    given: Given = field(init=False)
    done: list[Job] = field(default_factory=list)  # of a sweep
    codes: list[int] = field(default_factory=list)  # of every job that was begun

    def main(self) -> None:
        """The command; ends the process with its exit code."""
        with forgiving() if self.forgives else nullcontext():
            code = self._start()
        sys.exit(code)

    def _start(self) -> int:
        """Reads the command line and has Hydra call :meth:`_run` for each job; the exit code of all of them."""
        name = self.door.name
        try:
            self.given = arguments.read(sys.argv[1:], self.door)
            if self.given.several and self.compare is None:
                raise UserError(f"stack.{name} does one thing at a time; leave -m out")
        except UserError as error:
            _tell(error)
            return 2
        command.remember(self.given)
        self.done, self.codes = [], []
        try:
            with _composed(self.given):
                hydra.main(version_base="1.3", config_path=CONF, config_name=name)(self._run)()
        except SystemExit as stop:
            self.codes[-1:] = [int(stop.code or 0) if self.codes or not stop.code else 2]
        except KeyboardInterrupt:
            _say_interrupted()
            self.codes.append(130)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            _tell(UserError(arguments.explained(error, self.door)))
            self.codes.append(2)
        if self.done and self.compare is not None and os.environ.get("RANK", "0") == "0":
            _exit_code(lambda: self.compare(self.done) or 0)
        stopped = self.codes[-1] if self.codes and self.codes[-1] > 128 else 0
        return stopped or next((code for code in self.codes if code), 0)

    def _run(self, values: DictConfig) -> None:
        """One job, of a composed configuration."""
        self.codes.append(1)  # whatever happens
        if not self.given.several:
            self.codes[-1] = _exit_code(lambda: self._at_home(values))
            return
        one = _job_of(values, self.given.swept, self.done)
        with sweep.apart(one.title):
            self.codes[-1] = _exit_code(lambda: self._at_home(_renamed(values, one.name)))
        self.done.append(dataclasses.replace(one, code=self.codes[-1]))
        if self.codes[-1] > 128 or (self.codes[-1] and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            raise SystemExit(self.codes[-1])  # ranks whose jobs end differently would wait for each other

    def _at_home(self, values: DictConfig) -> int:
        config = typed(values, self.door.schema)
        with home():
            return self.job(config)


def entry(
    config_name: str,
    schema: type[Schema],
    job: Callable[[Schema], int],
    *,
    positional: str | None = None,
    compare: Callable[[Sequence[Job]], None] | None = None,
    forgives: bool = True,
) -> Callable[[], None]:
    """The ``main`` of an entry point: compose ``conf/CONFIG_NAME.yaml`` with the command line, then ``job``.

    A :class:`UserError`, and what Hydra finds wrong with the command line, print one message and exit with 2; any other
    exception keeps its traceback and exits with 1. A sweep attempts all of its jobs and exits as the first one that
    failed; a signal ends it, with its own code.

    Args:
        config_name: the entry point is ``stack.CONFIG_NAME``.
        schema: its settings; which of them are paths and texts, that are taken as typed, the types say.
        job: returns the exit code.
        positional: the setting that an argument without ``KEY=`` stands for.
        compare: gets the jobs of a sweep (``-m``) at its end; without it there is no sweep.
        forgives: go on where nobody is there any more to read what is printed; see :mod:`stack.core.streams`.
    """
    return Entry(Door(config_name, schema, positional), job, compare, forgives).main


def _exit_code(work: Callable[[], int]) -> int:
    """What ``work`` returns, or the exit code of what it raises, which is told."""
    try:
        return work()
    except UserError as error:
        _tell(error)
        return 2
    except LostError as error:
        print(f"rank {os.environ.get('RANK', '0')}: stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say_interrupted()
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            print(f"error: {error}; make room, or give other folders with data_dir and runs_dir", file=sys.stderr)
            return 2
        traceback.print_exc()  # Hydra would cut it short
        return 1


def _tell(error: UserError) -> None:
    if not isinstance(error, EchoError):
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"rank {rank}: error: {error}", file=sys.stderr)


def _say_interrupted() -> None:
    print("interrupted; the same command goes on from what is finished", file=sys.stderr)


@contextmanager
def _composed(given: Given) -> Iterator[None]:
    """Around Hydra: it reads what we have read, raises what it finds wrong, and leaves no folder of its own."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with ExitStack() as stack:
        scratch = []
        if given.several:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            scratch = [f"hydra.sweep.dir={quoted(folder)}", "hydra.sweep.subdir=."]
        sys.argv = [before[0], *given.hydra, *(one for one in scratch if not _has(given.hydra, one))]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = before
            os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)


def _has(given: list[str], override: str) -> bool:
    key = override.partition("=")[0]
    return any(argument.partition("=")[0] == key for argument in given)


def _job_of(values: DictConfig, swept: Sequence[str], done: Sequence[Job]) -> Job:
    """The job of a sweep that begins now, after those that are done; rank 0 says so."""
    told = HydraConfig.get()
    keys = [*swept, *(told.sweeper.get("params") or {})]
    differs = sweep.differences(OmegaConf.to_container(told.overrides.task), keys)
    base, runs_dir = str(values.get("name", "")), os.path.expanduser(str(values.get("runs_dir", "")))
    title = done[0].title if done else sweep.title_of(base, differs)
    if os.environ.get("RANK", "0") == "0":
        shown = ", ".join(f"{key}={value}" for key, value in differs.items())
        print(f"job {len(done) + 1}: {shown or 'nothing differs'}", flush=True)
    return Job(sweep.name_of(base, differs), title, differs, runs_dir, 1)


def _renamed(values: DictConfig, name: str) -> DictConfig:
    if "name" in values:
        values.name = name
    return values
