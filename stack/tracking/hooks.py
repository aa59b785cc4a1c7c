"""A run's figures on their way: every step to the terminal, rows to the record and to wandb."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack.core import machine
from stack.tracking.terminal import Display, duration
from stack.tracking.tracker import Tracker
from stack.training.hooks import Hook, Moment
from stack.training.state import State
from stack.training.trainer import Step

LATEST = 20  # steps whose mean training loss stands for the run where nothing is held out; the page's number


class Progress(Hook):
    """Shows and writes how each step went, and sums the run up at its end.

    Args:
        step: of the run.
        display: the terminal.
        tracker: the record, on rank 0.
        described: says the latest validation in a few words.
    """

    def __init__(self, step: Step, display: Display, tracker: Tracker | None, described: Callable[[], str]):
        self.step, self.display, self.tracker, self.described = step, display, tracker, described
        self.begun = time.perf_counter()
        self.steps = self.tokens = 0  # since then, of steps that were taken
        self.losses: deque[float] = deque(maxlen=LATEST)  # of the latest steps that were taken
        self.memory = machine.memory_figures(step.device)  # after the latest step, before anything else

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """Shows the step; where ``track.every`` says so it is written as a row of its own."""
        self.memory = machine.memory_figures(self.step.device)
        self.steps += 1
        if moment.result.taken:
            self.losses.append(moment.result.loss)
            self.tokens += moment.result.tokens
        if self.tracker is not None:
            every = self.step.config.track.every
            if moment.state.step % every and not moment.end:
                self.tracker.alive()
            else:
                self.tracker.write(self._row(moment))
        self.display.step(moment.state.step, moment.steps, self._line(moment))
        return {}

    def _row(self, moment: Moment) -> dict[str, Any]:
        state, result = moment.state, moment.result
        return {
            "step": state.step,
            "tokens": state.tokens,
            "train/loss": result.loss,
            "train/skipped_steps": state.skipped_steps,
            "optim/grad_norm": result.norm,
            **{f"optim/lr_{g['name']}": g["peak_lr"] * moment.factor for g in self.step.optimizers.groups()},
            "throughput/tokens_per_s": result.tokens / moment.seconds,
            "throughput/waiting_share": moment.waited / moment.seconds,
            **{f"memory/{key}": value for key, value in self.memory.items()},
            "time/step_s": moment.seconds,
            "time/unix_s": time.time(),
        }

    def _line(self, moment: Moment) -> list[str]:
        """What there is to say, the most important first: a narrow window shows the beginning."""
        seconds = time.perf_counter() - self.begun
        left = seconds / self.steps * (moment.steps - moment.state.step)
        return [
            f"loss {moment.result.loss:.4f}",
            f"ETA {duration(left)}",
            f"{self.tokens / seconds:,.0f} tokens/s",
            f"peak {self.memory['peak_gb']:.2f} GB",
            f"{moment.waited / moment.seconds:.0%} waiting",
            self.described(),
        ]

    def summary(self, state: State, quality: tuple[str, float | None], planned: int, checkpoint: Path) -> None:
        """The five figures that matter, each on a line that fits 40 columns, and where the result lies.

        Args:
            state: of the run.
            quality: the figure that says how good the model is, by name; None where it is not finite.
            planned: bytes of a step.
            checkpoint: the newest.
        """
        name, value = quality
        seconds = time.perf_counter() - self.begun
        skipped = f", {state.skipped_steps} skipped" if state.skipped_steps else ""
        figures = {
            name: "not finite" if value is None else f"{value:.4f}",
            "tokens": f"{state.tokens:,}",
            "tokens/s": f"{self.tokens / seconds:,.0f}",
            "peak memory": f"{machine.memory_figures(self.step.device)['peak_gb']:.2f} GB",
            "time": duration(seconds),
        }
        self.display.stop()
        self.display.show(f"memory of a step: planned {planned / 1e9:.2f} GB, measured {self.memory['peak_gb']:.2f} GB")
        self.display.show(f"finished: {state.step} steps{skipped}")
        for name, value in figures.items():
            self.display.show(f"  {name:<15} {value:>15}")
        self.display.show(str(checkpoint))


class Write(Hook):
    """Writes what the hooks before it have found as one row, on rank 0."""

    def __init__(self, tracker: Tracker | None):
        self.tracker = tracker

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """Writes the row, if there is anything in it."""
        if moment.row and self.tracker is not None:
            self.tracker.write({"step": moment.state.step, "tokens": moment.state.tokens} | moment.row)
        return {}

    def state(self) -> dict[str, Any]:
        """Bytes of the record that belong to the checkpoint, safe on disk."""
        return {"metrics_offset": 0 if self.tracker is None else self.tracker.offset()}

    def load(self, values: dict[str, Any]) -> None:
        """The record began there already."""
        values.pop("metrics_offset", None)
