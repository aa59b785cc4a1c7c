"""stack.core.files: locks and syncing, where the file system offers them and where it does not.

A file system without them is the real one behind a library that answers as the kernel does for such a mount.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny

from stack.core import files as disk
from stack.core import locks

WITHOUT = r"""
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
static int refuse(const char *name) { const char *said = getenv(name); return said ? atoi(said) : 0; }
int flock(int file, int how) { errno = refuse("NO_FLOCK"); return errno ? -1 : 0; }
int fsync(int file) { errno = refuse("NO_FSYNC"); return errno ? -1 : 0; }
"""
HOLD = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from stack.core import locks
with ExitStack() as held:
    print(locks.take(Path(sys.argv[1]), held, print), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    (folder / "without.c").write_text(WITHOUT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "without.so", folder / "without.c"], check=True)
    return folder / "without.so"


def holder(lock: Path, library: Path | None = None, error: int = errno.ENOLCK) -> subprocess.Popen:
    """A process that takes the lock, says who had it, and gives it back at a line feed."""
    env = dict(os.environ) if library is None else {**os.environ, "LD_PRELOAD": str(library), "NO_FLOCK": str(error)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], cwd=Path(__file__).parents[2], **pipes)


def end(process: subprocess.Popen) -> list[str]:
    """Everything that it said, once it has given the lock back."""
    return process.communicate("\n", timeout=30)[0].splitlines()


@pytest.mark.parametrize("error", [None, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL])
def test_one_holder_at_a_time_on_any_file_system(tmp_path: Path, without: Path, error: int | None) -> None:
    lock, library = tmp_path / "lock", None if error is None else without
    first = holder(lock, library, error or 0)
    said = first.stdout.readline()
    if error is not None:
        assert "without locks" in said and os.strerror(error) in said
        said = first.stdout.readline()
    assert said == "None\n"
    assert f"process {first.pid}" in end(holder(lock, library, error or 0))[-1]
    end(first)
    again = holder(lock, library, error or 0)
    assert end(again)[-1] == "None"
    killed = holder(lock, library, error or 0)
    while killed.stdout.readline() != "None\n":
        pass
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert end(holder(lock, library, error or 0))[-1] == "None"  # nobody alive holds it


def test_only_its_own_host_knows_whether_a_holder_lives(tmp_path: Path, without: Path) -> None:
    lock = tmp_path / "lock"
    named = {"host": "elsewhere", "process": 1, "began": "a boot 7"}
    for content, said in ((json.dumps(named), "host elsewhere, process 1"), ("", "has not said which")):
        (tmp_path / "lock.holder").write_text(content)
        found = end(holder(lock, without))[-1]
        assert said in found and f"remove {lock}.holder" in found
    # The number of a process that has ended goes to another one.
    import socket

    (tmp_path / "lock.holder").write_text(json.dumps(named | {"host": socket.gethostname(), "process": os.getpid()}))
    assert end(holder(lock, without))[-1] == "None"


def test_other_errors_of_locks_and_syncing_stay_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="broken"):
        disk.sync_path(tmp_path)
    monkeypatch.setattr("fcntl.flock", fails)
    with pytest.raises(OSError, match="broken"), ExitStack() as held:
        locks.take(tmp_path / "lock", held)


def test_a_run_where_nothing_of_it_is_offered(tmp_path: Path, without: Path) -> None:
    """It trains and saves, says both once at its beginning, and keeps a second job out."""
    env = {"LD_PRELOAD": str(without), "NO_FLOCK": str(errno.ENOSYS), "NO_FSYNC": str(errno.EINVAL)}
    command = [sys.executable, "-m", "stack.train", *tiny.settings(tmp_path, "train.steps=100000")]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT)
    run = tmp_path / "runs/tiny"
    try:
        tiny.until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        second = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
        assert second.returncode == 2 and f"process {job.pid}" in second.stderr
    finally:
        job.terminate()
        code = job.wait(60)
    said = (tmp_path / "log").read_text()
    assert code == 143, said
    assert said.count("without locks") == 2 and said.count("power cut") == 1  # of the run and of the packed data
    assert not (run / ".lock.holder").exists() and list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("umask", "files", "folders"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_everything_follows_the_umask(tmp_path: Path, umask: int, files: int, folders: int) -> None:
    job = tiny.Job(_under, str(tmp_path), umask, log=tmp_path / "log")
    assert job.wait() == 0, job.output()
    made = [path for root in ("runs", "data") for path in (tmp_path / root).rglob("*") if not path.is_symlink()]
    assert any(path.name == "model.safetensors" for path in made)
    wrong = {
        str(p): oct(p.stat().st_mode) for p in made if p.stat().st_mode & 0o777 != (folders if p.is_dir() else files)
    }
    assert not wrong


def _under(root: str, umask: int) -> None:
    os.umask(umask)
    tiny.command(tiny.settings(Path(root), "train.steps=1"))


def test_what_a_kill_left_of_a_tokenizer_is_cleared_and_a_living_one_is_not(tmp_path: Path) -> None:
    from stack.core.files import LOCK, create_folder

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")

    left, living, unlocked, old = (tmp_path / f".bpe-12345678-{name}" for name in ("left", "living", "new", "old"))
    for folder in (left, living, unlocked, old):
        (folder / "made").mkdir(parents=True)
    process = holder(living / LOCK)
    assert process.stdout.readline() == "None\n"
    (left / LOCK).write_text("host here, process 1\n")
    day = 86_400
    os.utime(old, (time.time() - 2 * day,) * 2)
    create_folder(tmp_path / "bpe-87654321", make)
    assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, unlocked.name, "bpe-87654321"]
    end(process)
