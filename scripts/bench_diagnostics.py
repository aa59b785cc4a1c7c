"""What everything that is measured while training costs: on against off, in turns, in one process on one thread.

    python scripts/bench_diagnostics.py [OVERRIDES]

Two trainers of the laptop's configuration take the same steps in turns, one as it is configured by default, with wandb
offline, and one with ``OFF``; a step is what the training loop does for one, from its batch to its rows of metrics. A
round is a step at which something is due and one at which nothing is, each of both trainers, in a drawn order. Prints
the median over the rounds of on to off for both kinds of step, weighed as they come by default, in processor time and
by the clock. The spread is the 5th to the 95th percentile of 2,000 draws of the rounds with replacement. Tokenizer and
packed data are those of the quickstart, and are made where they are not there yet.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir

from stack import job, train
from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import Config
from stack.core.ranks import ALONE
from stack.tracking.terminal import Display
from stack.tracking.tracker import Tracker
from stack.training.prepare import prepare_data
from stack.training.run_folder import FRESH
from stack.training.signals import Signals
from stack.training.state import State
from stack.training.trainer import Trainer

OFF = ("diagnostics.rows_every=0", "track.mode=disabled")
ROUNDS = 30
TARGET = 1.02


def begun(folder: str, *more: str) -> tuple[Trainer, Tracker]:
    """A trainer before its first step, as :meth:`stack.job.Job.train` has it, and its record."""
    with initialize_config_dir(CONF, version_base="1.3"):
        c = typed(compose("train", overrides=["checkpoint.every=0", *sys.argv[1:], f"runs_dir={folder}", *more]))
    assert isinstance(c, Config)
    tokenizer, packed = prepare_data(c, ALONE, Display(True).show)
    own, made = job.Job(c, "cpu", ALONE, Display(False), FRESH), train.materials_of(c, tokenizer, packed)
    own.folder.mkdir(parents=True)
    start = job.begin(own, made)
    tracker = own.tracker(start, c.track.mode)
    hooks = job.hooks_of(own, made, start, tracker)
    return Trainer(start.step, made.train, State(), start.steps, hooks.all, Signals()), tracker


def turn(t: Trainer, step: int) -> tuple[float, float]:
    """One step of the loop: seconds of processor, and by the clock."""
    used, begin = time.process_time(), time.perf_counter()
    t.state.step = step
    t.advance(t.micro_batches(step), begin, 0.0)
    return time.process_time() - used, time.perf_counter() - begin


def main() -> None:
    """Measures, prints, and exits with 1 where the target is missed in processor time."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        started = begun(folder, "name=off", *OFF), begun(folder, "name=on", "track.mode=offline")
        both = [one for one, _ in started]
        every = both[1].step.config.diagnostics.rows_every
        for step in (0, every - 1):  # the first ones have memory to get
            turn(both[0], step), turn(both[1], step)
        seconds = np.zeros((ROUNDS, 2, 2, 2))  # round; due or not; off or on; processor or clock
        for number in range(ROUNDS):
            due = (number % 10 + 1) * every - 1  # the step behind which a look is due
            for place in draw.permutation(4):
                idle, on = divmod(int(place), 2)
                seconds[number, idle, on] = turn(both[on], due - idle)
        for _, record in started:
            record.close(0)
        rows = (Path(folder) / "on/metrics.jsonl").read_text().splitlines()
        looks = [len(row) for row in rows if "rows/norm_p50" in row]
        assert len(looks) == ROUNDS + 1

    def ratio(some: np.ndarray) -> float:
        due, idle = np.median(some[:, :, 1] / some[:, :, 0], axis=0)
        return float((due + (every - 1) * idle) / every)

    print(f"{ROUNDS} rounds; a look every {every} steps, {np.mean(looks):,.0f} bytes of metrics each")
    for kind, some in (("processor", seconds[..., 0]), ("clock", seconds[..., 1])):
        spread = np.percentile([ratio(some[draw.integers(0, ROUNDS, ROUNDS)]) for _ in range(2000)], (5, 95))
        off, idle, due = np.median(some[:, :, 0]), np.median(some[:, 1, 1]), np.median(some[:, 0, 1])
        print(
            f"{kind:<10}off {off * 1e3:.0f} ms, on {idle * 1e3:.0f} ms, with a look {due * 1e3:.0f} ms a step; "
            f"on / off {ratio(some):.4f} ({spread[0]:.4f} to {spread[1]:.4f}), the look alone "
            f"{(np.median(some[:, 0, 1] / some[:, 0, 0]) - 1) / every:.2%} of a step"
        )
    print(f"target: {TARGET}")
    sys.exit(int(ratio(seconds[..., 0]) > TARGET))


if __name__ == "__main__":
    main()
