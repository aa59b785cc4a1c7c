"""What happens around a step, and when.

A hook is called at every step, on every rank, in the order of the trainer's list. What its :meth:`Hook.after_step`
returns is merged into the row of that step, which the hooks behind it see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stack import checkpoint
from stack.core.errors import UserError
from stack.core.ranks import Ranks
from stack.data.batches import Batch
from stack.training.state import State, StepResult


@dataclass
class Moment:
    """The moment after a step."""

    state: State  # with the step counted
    steps: int  # the end of the run
    result: StepResult
    batches: list[Batch]  # micro-batches of this rank
    factor: float  # of every learning rate
    seconds: float  # that the step took, its waiting included
    waited: float  # seconds for the batches
    stop: int  # the signal that stops the run after this step, 0 for none
    row: dict[str, Any] = field(default_factory=dict)  # what the hooks before have found

    @property
    def end(self) -> bool:
        """True after the last step."""
        return self.state.step >= self.steps


@dataclass(frozen=True)
class Every:
    """When something is due: every so many steps (0: never) and at the end, perhaps also where a signal stops."""

    steps: int
    stopping: bool = False

    def due(self, moment: Moment) -> bool:
        """Whether it is due after this step."""
        asked = bool(self.steps) and moment.state.step % self.steps == 0
        return asked or moment.end or (self.stopping and moment.stop > 0)


class Hook:
    """Does nothing at any step; what is a hook overrides what it needs."""

    def before_step(self, step: int) -> None:
        """Before the first forward pass of ``step`` (0 …), where the step has anything to learn."""

    def after_backward(self) -> None:
        """When the gradient of the global batch is there, before it is clipped."""

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """After the update, and where none was taken, too; what it has found, as ``SECTION/NAME``."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON values; a collective."""
        return {}

    def load(self, values: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave out of ``values``; an older version may not have saved it."""


class BadSteps(Hook):
    """Ends a run whose loss or norm is not finite for too many steps in a row.

    Args:
        limit: so many steps.
        alert: hears of the first few.
        newest: finds the last good checkpoint, for the message.
    """

    ALERT = 3  # steps in a row

    def __init__(self, limit: int, alert: Callable[[str, str], None], newest: Callable[[], Path | None]):
        self.limit, self.alert, self.newest = limit, alert, newest

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """Raises UserError at the limit."""
        bad, result, step = moment.state.bad_in_a_row, moment.result, moment.state.step
        if bad == self.ALERT:
            self.alert(
                "not finite",
                f"{bad} steps in a row are not finite: loss {result.loss}, norm {result.norm} at step {step}",
            )
        if bad >= self.limit:
            raise UserError(
                f"{self.limit} steps in a row had a loss or gradient norm that is not finite (loss {result.loss}, norm "
                f"{result.norm} at step {step}); the last good checkpoint is {self.newest() or 'none'}; "
                "lower optim.lr and optim.matrix_lr, or raise schedule.warmup"
            )
        return {}


class Save(Hook):
    """Saves a checkpoint where it is due, on rank 0.

    Args:
        every: when.
        keep: so many of the newest stay.
        checkpoints: the folder.
        ranks: this process among others.
        contents: what is saved, as :func:`stack.checkpoint.save` takes it.
        hooks: whose states are saved.
    """

    METRICS = ("eval/bits_per_byte", "eval/loss")  # the first that was measured says which checkpoint is the best

    def __init__(
        self,
        every: Every,
        keep: int,
        checkpoints: Path,
        ranks: Ranks,
        contents: Callable[[], dict[str, Any]],
        hooks: Sequence[Hook],
    ):
        self.every, self.keep, self.checkpoints, self.ranks = every, keep, checkpoints, ranks
        self.contents, self.hooks = contents, hooks

    def after_step(self, moment: Moment) -> dict[str, Any]:
        """Saves, then removes what is not kept."""
        if self.every.due(moment):
            state = asdict(moment.state)
            for hook in self.hooks:
                state |= hook.state()
            metric = next((moment.row[key] for key in self.METRICS if key in moment.row), None)
            self.ranks.on_main(lambda: self._save(state, metric))
        return {}

    def _save(self, state: dict[str, Any], metric: float | None) -> None:
        checkpoint.save(self.checkpoints, state["step"], state=state, metric=metric, **self.contents())
        checkpoint.retain(self.checkpoints, self.keep)
