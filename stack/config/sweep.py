"""Several jobs from one command (``-m``): how each is called, and what must not pass from one to the next.

A job is a run of its own, ``runs/NAME-KEY-VALUE``, with every key of which the jobs differ: ``laptop-lr-0.001``. The
name follows from the settings alone, so the same command goes on with what is unfinished and reuses what is finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stack.config.grammar import parsed, text_of

# Safe in a shell, in a file system and in name=. A dash of another text could be taken for the one in front of a key.
_SAFE = re.compile(r"[\w.+]{1,40}|-?\d{1,20}(\.\d{1,20})?(e-?\d{1,3})?")
_LONGEST = 150  # characters of a name; file systems take 255 bytes
_DIGITS = 6  # of a digest, where a value does not fit a name


@dataclass(frozen=True)
class Job:
    """One job of a sweep that has ended."""

    name: str  # of its run
    title: str  # what all jobs of the sweep have in common
    differs: dict[str, str]  # its values of what the jobs differ in, by short key
    runs_dir: str
    code: int  # its exit code


def differences(overrides: Sequence[str], swept: Sequence[str]) -> dict[str, str]:
    """What a job's command line has of the swept keys, by the last part of the key where that is clear."""
    values = {}
    for argument in overrides:
        override = parsed(argument)
        if override is not None and (key := override.get_key_element().lstrip("+")) in swept:
            values[key] = text_of(override)
    last = [key.rpartition(".")[2] for key in values]
    return {short if last.count(short) == 1 else key: values[key] for key, short in zip(values, last, strict=True)}


def name_of(base: str, differs: dict[str, str]) -> str:
    """The name of a job's run: safe in a shell and a file system, readable, and another one for other values."""
    parts = [base, *(f"{_word(key)}-{_word(value)}" for key, value in differs.items() if key != "name")]
    name = "-".join(parts)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{_digest(name)}"


def title_of(base: str, differs: dict[str, str]) -> str:
    """The name of the sweep: its group in wandb, and its page."""
    return "-".join([base, *map(_word, differs)])[:_LONGEST]


def _word(value: str) -> str:
    if _SAFE.fullmatch(value):
        return value
    readable = re.sub(r"[^\w.+-]+", "_", value).strip("_")[:30]
    return f"{readable}-{_digest(value)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


@contextmanager
def apart(title: str) -> Iterator[None]:
    """Around a job: it is of a group in wandb, and leaves the process as it was before.

    What it has set in the environment, its memory, compiled code, wandb's service and what was measured once for the
    whole process are gone afterwards.
    """
    before = dict(os.environ)
    os.environ.setdefault("WANDB_RUN_GROUP", title)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        _forget()


def _forget() -> None:
    """Clears what a job leaves in modules; one that is not loaded has nothing to clear."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()  # it compiles a function only so often
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if (machine := sys.modules.get("stack.core.machine")) is not None:
        machine.program_memory.cache_clear()
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # its heap keeps what is free; what the next job takes is measured from here
