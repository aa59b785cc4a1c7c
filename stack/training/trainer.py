"""One optimizer step, and the loop around it. Pretraining and fine-tuning share both.

The loss of a step is the sum of the token losses of the whole global batch divided by its number of supervised
tokens, counted over all ranks before the first forward pass. So neither accumulation nor ranks nor padding change
the number, the gradient or its norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stack.config.schema import Run
from stack.core import machine
from stack.core.ranks import Ranks
from stack.data.batches import Batch, Batches, Mixed
from stack.model.attention import Segments
from stack.model.decoder import Decoder, Loss
from stack.parallel import wrap as parallel
from stack.training.hooks import Hook, Moment
from stack.training.optim import Optimizers, lr_factor
from stack.training.signals import Signals
from stack.training.state import State, StepResult


class Step:
    """One optimizer step of ``model`` and all that it needs.

    Args:
        config: everything.
        model: the decoder on its device.
        ranks: this process among others.
    """

    def __init__(self, config: Run, model: Decoder, ranks: Ranks):
        self.config, self.model, self.ranks = config, model, ranks
        self.device = next(model.parameters()).device.type
        self.dtype = machine.choose_precision(config.precision, self.device)
        self.loss = Loss(config.train.loss, config.train.chunk_tokens, config.train.z_loss)
        ns_dtype = torch.bfloat16 if machine.fast_bf16(self.device) else torch.float32
        self.optimizers = Optimizers(model, config.optim, ns_dtype=ns_dtype, ranks=ranks)
        self.wrapped = parallel.wrap(model, ranks)

    def __call__(
        self, number: int, micro_batches: list[Batch], factor: float, hooks: Sequence[Hook] = ()
    ) -> StepResult:
        """Step ``number`` over the micro-batches of this rank, with every learning rate at ``factor`` of its peak.

        A step without a supervised token, or with a loss or norm that is not finite, changes neither weights nor
        moments.
        """
        count = int(self.ranks.sum(sum(batch.num_targets for batch in micro_batches))[0])
        if count == 0:
            return StepResult(0.0, 0.0, 0, taken=False)
        for hook in hooks:
            hook.before_step(number)
        loss = self._backward(micro_batches, count)
        for hook in hooks:
            hook.after_backward()
        norm, taken = self._update(number, loss, factor)
        return StepResult(loss, norm, count, taken)

    def _backward(self, micro_batches: list[Batch], count: int) -> float:
        """Adds up the gradient of the global batch; its loss in nats per supervised token."""
        losses = []
        for i, batch in enumerate(micro_batches):
            with parallel.unsynchronized(self.wrapped, last=i == len(micro_batches) - 1):
                with self.autocast():
                    total = self.wrapped(*to_device(batch, self.device), self.loss)
                # DDP averages over ranks; the sum over ranks divided by the count of all of them is wanted.
                (total * (self.ranks.world / count)).backward()
            losses.append(total.detach())
        return self.ranks.sum(torch.stack(losses).cpu().double().sum().item())[0] / count

    def _update(self, number: int, loss: float, factor: float) -> tuple[float, bool]:
        """Clips and updates, unless something is not finite; the norm before clipping, and whether it did."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total_norm = get_total_norm([p.grad for p in parameters])
        norm = float(total_norm)
        taken = math.isfinite(loss) and math.isfinite(norm)
        if taken:
            if self.config.train.clip:
                clip_grads_with_norm_(parameters, self.config.train.clip, total_norm)
            self.optimizers.step(number, factor)
        self.optimizers.zero_grad()
        return norm, taken

    def autocast(self) -> torch.autocast:
        """GEMMs in bfloat16 where the run says so; parameters, norms, softmax and sums stay float32."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)


@dataclass
class Trainer:
    """The loop: takes the steps of a run that are left, one after the other, with its hooks around each.

    Args:
        step: takes one step.
        data: the training split.
        state: where the run stands.
        steps: where it ends.
        hooks: in the order in which they are called.
        signals: what asks the run to stop.
    """

    step: Step
    data: Batches | Mixed
    state: State
    steps: int
    hooks: Sequence[Hook]
    signals: Signals

    def run(self) -> int:
        """Trains to the end; returns the exit code: 0, or 128 + the signal that stopped it."""
        state = self.state
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            ahead = pool.submit(self.micro_batches, state.step)
            while state.step < self.steps:
                started = time.perf_counter()
                batches = ahead.result()
                waited = time.perf_counter() - started
                ahead = pool.submit(self.micro_batches, state.step + 1)
                moment = self.advance(batches, started, waited)
                if moment.stop and not moment.end:
                    return 128 + moment.stop
        return 0

    def advance(self, batches: list[Batch], started: float, waited: float) -> Moment:
        """Takes the next step, with its hooks around it.

        Args:
            batches: this rank's.
            started: when the step began, on the clock of ``time.perf_counter``.
            waited: seconds since then that went by without them.
        """
        state = self.state
        factor = lr_factor(self.step.config.schedule, state.step, self.steps)
        result = self.step(state.step, batches, factor, self.hooks)
        state.count(result)
        seconds = time.perf_counter() - started
        stop = self.signals.of_any_rank(self.step.ranks)
        moment = Moment(state, self.steps, result, batches, factor, seconds, waited, stop)
        for hook in self.hooks:
            moment.row |= hook.after_step(moment)
        return moment

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; a pure function of data, seed and step."""
        return micro_batches(self.data, self.data.windows_of(step), self.step)


def micro_batches(data: Batches | Mixed, windows: Sequence[int], step: Step) -> list[Batch]:
    """This rank's part of a step's windows, in micro-batches; a window without a target where it has none."""
    shards = parallel.shard(windows, step.config.train.micro_batch, step.ranks)
    return [data.batch(numbers) if len(numbers) else data.padding() for numbers in shards]


def to_device(batch: Batch, device: str) -> tuple[Tensor, Tensor, Segments, Tensor]:
    """``ids, positions, segments, targets`` of a batch, as the model takes them."""
    where = torch.device(device)
    if where.type == "cuda":
        ids, positions, targets = (
            x.pin_memory().to(where, non_blocking=True) for x in (batch.ids, batch.positions, batch.targets)
        )
    else:
        ids, positions, targets = (x.to(where) for x in (batch.ids, batch.positions, batch.targets))
    return ids, positions, Segments(batch.lengths, batch.ids.shape[1], where), targets
