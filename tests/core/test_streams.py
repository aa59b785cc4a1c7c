"""stack.core.streams: who reads what a run says may go, and the run goes on; a hang-up stops it as a signal does."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

STEPS = "train.steps=40"


def command(root: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "stack.train", *tiny.settings(root, *more)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.packed(tmp_path_factory.mktemp("terminal"))


def finished(run: Path) -> bool:
    return len(tiny.rows(run)) >= 40 and (run / "checkpoints/step-00000040/manifest.json").is_file()


def nobody_reads() -> int:
    """``stack.train | head -n 0``."""
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("output", [nobody_reads, full_disk])
def test_output_that_fails_ends_nothing(root: Path, output: Callable[[], int]) -> None:
    name = f"fails-{output.__name__}"
    job = tiny.Job(_into, output, tiny.settings(root, f"name={name}", STEPS), log=root / f"{name}.log")
    assert job.wait() == 0
    assert finished(root / "runs" / name)


def _into(output: Callable[[], int], arguments: list[str]) -> None:
    failing = output()
    for number in (1, 2):
        os.dup2(failing, number)
    tiny.command(arguments)


def test_a_reader_that_leaves_midway_ends_nothing(root: Path) -> None:
    """``stack.train | head -n 1``."""
    job = subprocess.Popen(command(root, "name=head", STEPS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None and job.stdout.readline()
    job.stdout.close()
    assert job.wait(120) == 0
    assert finished(root / "runs/head")


def test_closed_from_the_beginning(root: Path) -> None:
    """And nothing of what is said gets into a file that took the number of a closed one."""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command(root, "name=closed", STEPS)]
    assert subprocess.run(closed, timeout=120).returncode == 0
    assert finished(root / "runs/closed")
    assert all(line.startswith("{") for line in (root / "runs/closed/metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("hears", [True, False])
def test_a_closed_terminal(root: Path, hears: bool) -> None:
    """A lost connection hangs up: the step is finished and saved, exit code 129. Under nohup the run goes on."""
    name, here, there = f"closed-{hears}", *pty.openpty()

    def lead() -> None:
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL if hears else signal.SIG_IGN)  # these tests may run under nohup

    steps = "train.steps=100000" if hears else STEPS
    job = subprocess.Popen(
        command(root, f"name={name}", steps), stdin=there, stdout=there, stderr=there, preexec_fn=lead
    )
    os.close(there)
    run = root / "runs" / name
    tiny.until(lambda: bool(os.read(here, 1 << 16)) and (run / "metrics.jsonl").exists())
    os.close(here)
    assert job.wait(120) == (129 if hears else 0)
    if hears:
        (saved,) = (run / "checkpoints").glob("step-*")
        assert len(tiny.rows(run)) >= int(saved.name.removeprefix("step-")) > 0
    else:
        assert finished(run)


def test_a_hang_up_of_one_rank_stops_all(root: Path) -> None:
    jobs = [
        tiny.train(root, "name=two", "parallel=ddp", "train.steps=100000", env=env, log=f"two-{env['RANK']}")
        for env in tiny.ranks_of(2)
    ]
    run = root / "runs/two"
    tiny.until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
    jobs[1].send_signal(signal.SIGHUP)
    assert [job.wait() for job in jobs] == [129, 129], jobs[0].output()
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("module", ["stack.plan", "stack.report", "stack.audit"])
def test_what_is_printed_for_nobody_costs_no_traceback(root: Path, module: str) -> None:
    tiny.train(root, "name=seen", "train.steps=1").wait()
    arguments = [] if module == "stack.plan" else ["seen", f"runs_dir={root}/runs"]
    job = tiny.Job(_printed_for_nobody, arguments, module, log=root / f"{module}.log")
    assert (job.wait(), job.output()) == (0, "")


def _printed_for_nobody(arguments: list[str], module: str) -> None:
    os.dup2(nobody_reads(), 1)
    tiny.command(arguments, module)
