"""Going on from a checkpoint: does it belong to the run, and what it puts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stack import checkpoint
from stack.core.errors import UserError
from stack.text.tokenizer import Tokenizer
from stack.training.hooks import Hook
from stack.training.run_folder import ResumePoint
from stack.training.state import State
from stack.training.trainer import Step


def check_belongs(start: ResumePoint, tokenizer: Tokenizer, identity: dict[str, Any]) -> None:
    """Raises :class:`UserError` where the checkpoint has another vocabulary or, not branched from, other data."""
    if start.vocabulary not in (None, tokenizer.digest):
        raise UserError(
            f"the checkpoint {start.checkpoint} was trained with another vocabulary: {start.num_rows} rows, digest "
            f"{start.vocabulary}; the tokenizer {tokenizer.folder} has {tokenizer.vocab_size}, digest "
            f"{tokenizer.digest}; give tokenizer.folder={start.checkpoint}"
        )
    if start.packed not in (None, identity["packed"]) and not start.branched:
        raise UserError(
            f"the checkpoint {start.checkpoint} was trained on other packed data: digest {start.packed}, now "
            f"{identity['packed']} ({identity['packed_folder']}); restore the data, or use name=NEW "
            f"branch={start.checkpoint}"
        )


def restore(start: ResumePoint, steps: int, step: Step, show: Callable[[str], None]) -> dict[str, Any]:
    """Puts back weights and moments of the checkpoint that the run goes on from, where there is one.

    Returns:
        What else it holds: the state of the run and of its hooks, for :func:`state_of`.

    Raises:
        UserError: the end lies before the checkpoint, or it does not fit the model.
    """
    if steps < start.step:
        raise UserError(
            f"the run stands at step {start.step}, its end is now asked to be step {steps}; give a later "
            "end, or go back with resume=CHECKPOINT"
        )
    if start.checkpoint is None:
        return {}
    loaded = checkpoint.load(Path(start.checkpoint))
    checkpoint.load_weights_into(step.model, loaded.weights)
    step.optimizers.load_moments(loaded.moments)
    show(f"going on from {start.checkpoint}: step {start.step} of {steps}")
    of_its_run = {"metrics_offset": 0, "last": {}} if start.branched else {}  # not of the branch
    return loaded.state | of_its_run


def state_of(values: dict[str, Any], hooks: Sequence[Hook], where: str) -> State:
    """Gives ``values`` of a checkpoint to the hooks; what is left is the run's.

    Raises:
        UserError: there is what this version does not know, which would be lost in the next checkpoint; ``where`` is
            named.
    """
    values = dict(values)
    state = State.take(values)
    for hook in hooks:
        hook.load(values)
    if values:
        raise UserError(
            f"{where} holds {', '.join(sorted(values))}, which this version does not know; a "
            "newer version of this program saved it: go on with that one"
        )
    return state
