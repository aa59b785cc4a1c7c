"""Shows that a run that was killed and started again is bit-equal to one that never was.

    python scripts/prove_resume.py [OVERRIDES]

Three runs of the laptop's model with the same settings, some 65 steps over more than two epochs at accumulation 3:
one is left alone, one is killed five times with SIGKILL at seeded moments, two of them inside a save, one is stopped
three times with SIGTERM. Prints every kill, and the SHA-256 of weights and moments of the three last checkpoints. Exit
code 1 where they differ. Overrides are passed to ``stack.train``; ``compile=auto``, for one, which is off here
because it takes its time at every start.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stack import checkpoint
from stack.data.packed import open_packed
from stack.tracking.metrics import MEASURED

HOME = Path("runs/prove_resume")
STEPS, EVERY = 66, 6


class Process(Protocol):
    """What is started and killed; ``subprocess.Popen`` is one."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, minus the signal that ended it; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Sends a signal."""

    def wait(self) -> int:
        """The exit code, once it has ended."""


class Kill(NamedTuple):
    """When a signal is sent: once ``step`` is in ``metrics.jsonl``, or inside the first save from ``step`` on."""

    step: int
    signal: int = signal.SIGKILL
    inside_save: bool = False


class Death(NamedTuple):
    """How one life of a run ended."""

    kill: Kill
    step: int  # the last one in metrics.jsonl
    saving: str  # the folder of the save that was cut off, or nothing
    code: int
    seconds: float


def kills(seed: int, count: int, inside: int, first: int, last: int, number: int = signal.SIGKILL) -> list[Kill]:
    """``count`` seeded moments between two steps, ``inside`` of them inside a save."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(first, last), count))
    chosen = set(draw.sample(range(count), inside))
    return [Kill(step, number, i in chosen) for i, step in enumerate(steps)]


def die_and_go_on(start: Callable[[], Process], run: Path, plan: Sequence[Kill]) -> list[Death]:
    """Starts the same command after every death, until it ends by itself; the last one of these is no death."""
    deaths: list[Death] = []
    todo = list(plan)
    while True:
        kill = todo[0] if todo else Kill(0, 0)
        step = max(kill.step, last_step(run) + 1)  # what an earlier life left behind is no moment of this one
        begun, process = time.monotonic(), start()
        while todo and process.poll() is None:
            if _partial(run, step) if kill.inside_save else last_step(run) >= step:
                process.send_signal(kill.signal)
                break
            time.sleep(0 if kill.inside_save else 0.002)
        code = process.wait()
        saving = _partial(run, step) if code == -signal.SIGKILL else ""
        deaths.append(Death(kill, last_step(run), saving, code, time.monotonic() - begun))
        if not todo or code not in (-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            return deaths
        if saving or not kill.inside_save:
            todo.pop(0)  # else the save was quicker than the kill, and the next one is tried


def _partial(run: Path, step: int) -> str:
    names = [path.name for path in (run / "checkpoints").glob(".step-*.partial")]
    return next((name for name in names if int(name[6:-8]) >= step), "")


def last_step(run: Path) -> int:
    """The step of the last whole row of ``metrics.jsonl``; 0 where there is none."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def record(run: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` without what clock and machine decide."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)} for line in lines]


def digests(run: Path) -> tuple[str, str]:
    """SHA-256 of the weights and of the moments of the newest checkpoint."""
    newest = checkpoint.newest(run / "checkpoints", print)
    assert newest is not None, f"{run} has no checkpoint"
    loaded = checkpoint.load(newest)
    return checkpoint.digest_tensors(loaded.weights), checkpoint.digest_tensors(loaded.moments)


def main(overrides: list[str]) -> int:
    """Runs the three and compares."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    source = Path("data/corpus/wikipedia.jsonl")
    if not source.exists():
        sys.exit(f"{source} is missing; python scripts/fetch_corpus.py")
    with source.open(encoding="utf-8") as lines, (HOME / "text.jsonl").open("w", encoding="utf-8") as text:
        size = 0
        while size < 70_000:
            size += text.write(next(lines))
    settings = [
        f"data=none data.files=[{HOME}/text.jsonl] data.validation=0.1 tokenizer.vocab_size=1024 data_dir={HOME}/data",
        f"runs_dir={HOME}/runs model=laptop train.steps={STEPS} train.window=256 train.global_batch=3",
        f"train.micro_batch=1 checkpoint.every={EVERY} evaluate.every={EVERY} sample.tokens=8 compile=off",
    ]
    command = [sys.executable, "-m", "stack.train", *" ".join(settings).split(), *overrides]
    plans = {
        "alone": [],
        "sigkill": kills(seed=1, count=5, inside=2, first=2, last=STEPS - EVERY),
        "sigterm": kills(seed=2, count=3, inside=0, first=2, last=STEPS - EVERY, number=signal.SIGTERM),
    }
    runs = {}
    for name, plan in plans.items():
        run = HOME / "runs" / name
        with (HOME / f"{name}.log").open("wb") as log:
            deaths = die_and_go_on(
                lambda name=name, log=log: subprocess.Popen([*command, f"name={name}"], stdout=log, stderr=log),
                run,
                plan,
            )
        for death in deaths:
            what = f"inside {death.saving}" if death.saving else f"after step {death.step}"
            how = signal.Signals(death.kill.signal).name if death.code else "its own end"
            print(f"{name:8} {how:16} {what:32} exit code {death.code:4}  {death.seconds:5.1f} s", flush=True)
        if deaths[-1].code:
            sys.exit(f"{name} failed: see {HOME / name}.log")
        runs[name] = (*digests(run), record(run))
    tokens = [row["tokens"] for row in runs["alone"][2] if "train/loss" in row]
    (packed,) = (HOME / "data/packed").glob("own-*")
    epochs = tokens[-1] / open_packed(packed).split("train").num_targets
    print(f"{len(tokens)} steps, {tokens[-1]:,} tokens, {epochs:.2f} epochs")
    for name, (weights, moments, rows) in runs.items():
        equal = rows == runs["alone"][2]
        print(f"{name:8} weights {weights[:16]}… moments {moments[:16]}… {len(rows)} rows, equal: {equal}")
    return int(any(run != runs["alone"] for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
