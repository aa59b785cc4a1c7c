"""Muon: momentum whose update is orthogonalized, for the hidden matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stack.core.ranks import Ranks


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized by Newton-Schulz iterations (Jordan et al., 2024).

    Updates have AdamW's scale: ``lr * 0.2 * sqrt(max(rows, columns))`` times an orthogonal matrix has an RMS of about
    ``0.2 * lr`` (Liu et al., 2025, equation 4). Matrices of one shape are iterated in one batch. ``torch.optim.Muon``
    computes the same, one matrix at a time and always in bfloat16, which costs ten times as much on a CPU
    that has no such instructions.

    Args:
        groups: dictionaries with ``params`` (matrices only), ``lr``, ``weight_decay``, ``momentum``.
        ns_steps: iterations.
        dtype: of the iterations.
        ranks: share the matrices of each shape among them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, ns_steps: int, dtype: torch.dtype, ranks: Ranks):
        super().__init__(groups, {})
        self.ns_steps, self.dtype, self.ranks = ns_steps, dtype, ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for shape, parameters in shapes.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                updates = self.ranks.gather_rows(updates.to(self.dtype), lambda x: orthogonalize(x, self.ns_steps))
                scale = -group["lr"] * 0.2 * math.sqrt(max(shape))
                for p, update in zip(parameters, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.to(p.dtype), alpha=scale)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)  # Nesterov's look ahead


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """About ``U Vᵀ`` of each matrix ``U S Vᵀ`` of ``[n, a, b]``: the iteration drives singular values to near 1.

    Every iterate is a polynomial of ``x xᵀ`` times ``x``. In float32 only that polynomial and the small square are
    iterated, which is a quarter less work; bfloat16 has not the digits for a square, so there ``x`` itself is.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    if x.dtype == torch.bfloat16:
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x if wide else x.mT
    gram = x @ x.mT
    product = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device).expand_as(gram)
    for left in reversed(range(steps)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor @ product
        if left:
            gram = factor @ gram @ factor
    x = product @ x
    return x if wide else x.mT
