"""How long a run is: what one dry step finds, and the number of steps that follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stack.config.schema import Train
from stack.core.errors import UserError
from stack.data.batches import Batch, Batches, Mixed
from stack.training.trainer import Step, micro_batches


@dataclass(frozen=True)
class DryStep:
    """What a dry step found."""

    seconds: float  # that a step takes
    measured: dict[str, int]  # bytes by part of the memory plan


def dry_step(step: Step, data: Batches | Mixed, measure: Callable[[Batch], dict[str, int]]) -> DryStep:
    """Runs a step at full shape and forgets it: compiles, takes the peak of memory, measures.

    Weights and moments are put back and no random state is touched, so that it leaves no trace.

    Args:
        step: of the run.
        data: its training split.
        measure: is asked for the parts of memory with one micro-batch, when there are moments.

    Raises:
        UserError: ``train.micro_batch`` does not fit.
    """
    t = step.config.train
    weights = {name: p.detach().to("cpu", copy=True) for name, p in step.model.named_parameters()}
    moments = {key: value.clone() for key, value in step.optimizers.moments().items()}
    batches = micro_batches(data, np.arange(t.global_batch) % data.num_windows, step)
    one = batches[0]
    try:
        step(0, [one, one], 0.0)  # compiles, makes the moments, and accumulates on top of a gradient
        seconds = [_timed(step, [one] * count) for count in (1, 2)]
        measured = measure(one)
    except torch.OutOfMemoryError as error:
        raise UserError(f"train.micro_batch={t.micro_batch} does not fit: {error}; lower it") from error
    with torch.no_grad():
        for name, p in step.model.named_parameters():
            p.copy_(weights[name])
    step.optimizers.load_moments(moments)
    return DryStep(seconds[0] + max(0.0, seconds[1] - seconds[0]) * (len(batches) - 1), measured)


def _timed(step: Step, micro_batches: list[Batch]) -> float:
    begin = time.perf_counter()
    step(0, micro_batches, 0.0)
    if step.device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def num_steps(t: Train, data: Batches | Mixed, seconds: float, show: Callable[[str], None]) -> int:
    """The number of steps from whichever length is given; ``seconds`` is what one takes."""
    if t.steps is not None:
        return t.steps
    if data.end is not None:
        return -(-data.end // t.global_batch)
    if t.tokens is not None:
        per_step = data.num_targets / data.num_windows * t.global_batch
        return math.ceil(t.tokens / per_step)
    steps = max(1, int(t.minutes * 60 / seconds))
    show(f"train.minutes={t.minutes}: {seconds:.2f} s a step, so {steps} steps")
    return steps
