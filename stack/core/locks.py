"""Locks that end with the process that holds them, on every file system.

A lock is the kernel's (``flock``), so it is released however its holder ends. Where a file system has none (some
network and FUSE mounts), a file beside says who holds it: host, process and when that process began. A process of this
host that is no longer alive holds nothing; whether one of another host is alive cannot be told from here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# What a file system answers that has no locks, or cannot be told to write to the disk.
NOT_OFFERED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL)


def take(path: Path, held: ExitStack, show: Callable[[str], None] | None = None) -> str | None:
    """Take the lock ``path`` until ``held`` closes; None, or who holds it already.

    Args:
        path: the lock file, made if it is not there; its folder must exist.
        held: releases the lock.
        show: is told if the file system has no locks.
    """
    file = held.enter_context(open(path, "a+"))  # noqa: SIM115  closed, and so unlocked, by the stack
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "a process that has not said which it is"
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        if show is not None:
            show(f"{path.parent} is on a file system without locks ({error.strerror}); {_holder(path)} stands for one")
        return _take_by_name(_holder(path), held)
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}\n")
    file.flush()
    return None


def _holder(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def _take_by_name(path: Path, held: ExitStack) -> str | None:
    own = {"host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}
    while True:
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump(own, file)
        except FileExistsError:
            other = _read(path)
            if other is None or other["host"] != own["host"] or _alive(other):
                return _described(path, other, own["host"])
            path.unlink(missing_ok=True)
        else:
            held.callback(path.unlink, missing_ok=True)
            return None


def _read(path: Path) -> dict[str, Any] | None:
    """The holder that a file names; None where it names none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"host": str(found["host"]), "process": int(found["process"]), "began": found["began"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _described(path: Path, other: dict[str, Any] | None, host: str) -> str:
    if other is None:
        return f"a process that has not said which it is (remove {path} if there is none)"
    gone = "" if other["host"] == host else f" (remove {path} if it has ended)"
    return f"host {other['host']}, process {other['process']}{gone}"


def _alive(other: dict[str, Any]) -> bool:
    """Whether a process of this host still is the one that it was."""
    if other["began"] is not None:
        return _began(other["process"]) == other["began"]
    with contextlib.suppress(PermissionError):  # of another user, but there
        try:
            os.kill(other["process"], 0)
        except ProcessLookupError:
            return False
    return True


def _began(process: int) -> str | None:
    """What tells a process from every other one that has had its number: the boot, and the clock ticks since."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return None
