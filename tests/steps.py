"""One step by hand: batches, gradients by path of plain PyTorch in float64, and what a step leaves behind."""

from __future__ import annotations

import tiny
import torch
import torch.nn.functional as F

from stack import checkpoint
from stack.data.batches import IGNORED, Batch


def rows(*supervised: int, window: int = 16) -> list[Batch]:
    """Windows of one segment each, with that many supervised tokens at the end."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for count in supervised:
        stream = torch.randint(2, 300, (1, window + 1), generator=draw)
        targets = stream[:, 1:].clone()
        targets[:, : window - count] = IGNORED
        found.append(Batch(stream[:, :-1], targets, torch.arange(window)[None], ((window,),)))
    return found


def joined(batches: list[Batch]) -> Batch:
    """Some windows as one batch."""
    parts = [torch.cat([getattr(b, name) for b in batches]) for name in ("ids", "targets", "positions")]
    return Batch(*parts, tuple(length for b in batches for length in b.lengths))


def grouped(batches: list[Batch], size: int) -> list[Batch]:
    return [joined(batches[i : i + size]) for i in range(0, len(batches), size)]


class Spy:
    """In the place of the optimizers: keeps the gradients that come to them."""

    def __init__(self, trainer: tiny.Bench):
        self.optimizers, self.model, self.gradients = trainer.optimizers, trainer.model, {}
        trainer.take.optimizers = self  # type: ignore[assignment]

    def step(self, step: int, factor: float) -> None:
        self.gradients = {name: p.grad.double() for name, p in self.model.named_parameters()}

    def zero_grad(self) -> None:
        self.optimizers.zero_grad()


def reference(trainer: tiny.Bench, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over supervised tokens and its gradient: row by row from full logits, summed in float64."""
    total, count = 0.0, 0
    gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainer.model.named_parameters()}
    for batch in batches:
        losses = F.cross_entropy(
            trainer.model.logits(batch.ids).double().flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        found = torch.autograd.grad(losses.sum(), list(trainer.model.parameters()))
        for sum_, part in zip(gradients.values(), found, strict=True):
            sum_ += part
        total += losses.sum().item()
        count += int((batch.targets != IGNORED).sum())
    return total / count, {name: g / count for name, g in gradients.items()}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([g.flatten() for g in gradients.values()]).norm().item()


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of the norm of the whole gradient."""
    difference = {name: found[name] - wanted[name] for name in wanted}
    assert found.keys() == wanted.keys()
    assert norm_of(difference) <= 1e-6 * norm_of(wanted)


def snapshot(trainer: tiny.Bench) -> tuple[str, str]:
    return (
        checkpoint.digest_tensors(trainer.model.state_dict()),
        checkpoint.digest_tensors(trainer.optimizers.moments()),
    )
