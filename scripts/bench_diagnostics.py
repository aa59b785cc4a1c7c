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

from stack import train
from stack.config import schema as config
from stack.config.schema import Config
from stack.core.ranks import Ranks
from stack.model.decoder import Decoder
from stack.tracking.metrics import Display
from stack.training import run_folder
from stack.training.optim import lr_factor
from stack.training.trainer import Trainer

OFF = ("diagnostics.rows_every=0", "track.mode=disabled")
ROUNDS = 30
TARGET = 1.02


def trainer(folder: str, *more: str) -> Trainer:
    """A trainer before its first step, as :meth:`Trainer.run` has it."""
    with initialize_config_dir(config.CONF, version_base="1.3"):
        c = config.typed(compose("train", overrides=["checkpoint.every=0", *sys.argv[1:], f"runs_dir={folder}", *more]))
    assert isinstance(c, Config)
    here, display = Ranks(), Display(False)
    words, packed = train.stages(c, here, Display(True))
    model = Decoder(c.model, words.vocab_size, seed=c.seed)
    named = train.identity(c, words, packed)
    made = Trainer(c, model, train.split(c, packed, words), words, named, here, display)
    run_folder.folder_of(c).mkdir(parents=True)
    made.prepare(run_folder.Start())
    made.metrics = made._tracker(c.track.mode)
    return made


def turn(t: Trainer, step: int) -> tuple[float, float]:
    """One step of the loop: seconds of processor, and by the clock."""
    used, begin = time.process_time(), time.perf_counter()
    t.state.step = step
    batches, factor = t.micro_batches(step), lr_factor(t.config.schedule, step, t.steps)
    result = t.step(step, batches, factor)
    t._account(result)
    t.rows.saw(batches)
    t._log(result, factor, time.perf_counter() - begin, 0.0)
    t._periodic(stopping=False)
    return time.process_time() - used, time.perf_counter() - begin


def main() -> None:
    """Measures, prints, and exits with 1 where the target is missed in processor time."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        both = trainer(folder, "name=off", *OFF), trainer(folder, "name=on", "track.mode=offline")
        every = both[1].config.diagnostics.rows_every
        for step in (0, every - 1):  # the first ones have memory to get
            turn(both[0], step), turn(both[1], step)
        seconds = np.zeros((ROUNDS, 2, 2, 2))  # round; due or not; off or on; processor or clock
        for number in range(ROUNDS):
            due = (number % 10 + 1) * every - 1  # the step behind which a look is due
            for place in draw.permutation(4):
                idle, on = divmod(int(place), 2)
                seconds[number, idle, on] = turn(both[on], due - idle)
        for each in both:
            each.metrics.close(0)
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
