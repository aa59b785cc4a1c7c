"""The command line of this process: what it gives, and how it is given again."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from stack.config.arguments import Given

_given: list[Given] = []  # the command line of this process


def remember(given: Given) -> None:
    """Takes the command line that this process was started with."""
    _given[:] = [given]


def _as_typed(override: str) -> str:
    """What a person typed, for what Hydra has of it: in a sweep Hydra writes the settings of each job anew."""
    key = override.partition("=")[0]
    for read in _given:
        typed = [word for ours, word in read.typed.items() if ours == override or ours.startswith(f"{key}=")]
        if typed and key.lstrip("+") not in read.swept:
            return typed[-1]
    return override.removeprefix("++")


def command(name: str) -> str | None:
    """The command line that started this process, to be given again; None where it is none of this program's.

    ``resume=`` is left out: it went back once, and going on does not. Of a job of a sweep it is the command of this job
    alone, whose run is ``name``.
    """
    if not HydraConfig.initialized():
        return None
    told = HydraConfig.get()
    given = [_as_typed(text) for text in OmegaConf.to_container(told.overrides.task)]
    if told.mode == RunMode.MULTIRUN:
        given = [*(text for text in given if not text.startswith("name=")), f"name={name}"]
    python = Path(sys.executable)
    here = python.parent.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else Path()
    start = [str(here / "python")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = (int(os.environ[key]) for key in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        # Its own address is looked up by name otherwise, for minutes where the name of the host is nowhere known.
        nodes = [f"--nnodes={world // local}"] if world > local else ["--local-addr=127.0.0.1"]
        start = [str(here / "torchrun"), *nodes, f"--nproc-per-node={local}"]
    given = [text for text in given if not text.startswith("resume=")]
    return shlex.join([*start, "-m", f"stack.{told.job.config_name}", *given])


def is_given(key: str) -> bool:
    """Whether the command line sets ``key``, so that its value is no default; a sweep gives its jobs their names."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and key == "name":
        return True
    return any(ours.partition("=")[0].lstrip("+") == key for read in _given for ours in read.typed)
