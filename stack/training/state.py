"""Where a run stands, and what a step found."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """What one step found."""

    loss: float  # nats per supervised token over the global batch, with the z-loss
    norm: float  # of the gradient before clipping
    tokens: int
    taken: bool


@dataclass
class State:
    """Where a run stands. A checkpoint holds it beside weights and moments, with the states of the hooks."""

    step: int = 0  # optimizer steps behind it, skipped ones counted
    tokens: int = 0  # supervised tokens
    skipped_steps: int = 0
    bad_in_a_row: int = 0

    @classmethod
    def take(cls, values: dict[str, Any]) -> State:
        """The state of a checkpoint, out of ``values``; what an older version has not saved starts as above."""
        return cls(**{entry.name: values.pop(entry.name) for entry in fields(cls) if entry.name in values})

    def count(self, result: StepResult) -> None:
        """Counts a step."""
        self.step += 1
        self.tokens += result.tokens if result.taken else 0
        self.skipped_steps += not result.taken
        # A step with nothing to learn is no sign of trouble.
        self.bad_in_a_row = 0 if result.taken else self.bad_in_a_row + (result.tokens > 0)
