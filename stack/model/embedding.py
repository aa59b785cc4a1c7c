"""The table: one parameter ``[rows, d]`` and every use of it, as embedding and as head (Press & Wolf, 2017)."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.model.loss import Implementation, linear_cross_entropy


class Watch(Protocol):
    """Looks on while the table is used in a training step; what passes is as it is without it, bit for bit."""

    def embedded(self, ids: Tensor, rows: Tensor) -> None:
        """The ``rows`` ``[B, T, d]`` of ``ids`` ``[B, T]``, before they are scaled; their gradient can be hooked."""

    def scored(self, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> None:
        """The hidden states ``[B, T, d]`` that are scored against every row, and the targets ``[B, T]``."""


class Table(nn.Module):
    """One row per id. The head is the same parameter, so that nothing can untie them.

    Args:
        num_rows: of the table; equals the tokenizer's vocabulary.
        d: width of a row.
        scale_input: rows enter the model times ``sqrt(d)``.
        softcap: logits leave as ``softcap * tanh(logits / softcap)``.
    """

    def __init__(self, num_rows: int, d: int, *, scale_input: bool = False, softcap: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, d))
        self.scale = math.sqrt(d) if scale_input else 1.0
        self.softcap = softcap
        self.watch: Watch | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """``[B, T]`` int64 → ``[B, T, d]`` float32."""
        rows = F.embedding(ids, self.weight)
        if self.watch is not None:
            self.watch.embedded(ids, rows)
        return rows if self.scale == 1.0 else rows * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` → ``[..., rows]`` float32."""
        logits = F.linear(hidden, self.weight).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(
        self, hidden: Tensor, targets: Tensor, *, impl: Implementation, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        """Sum of the losses of the supervised tokens; see :func:`stack.model.loss.linear_cross_entropy`."""
        if self.watch is not None:
            self.watch.scored(hidden, targets, chunk_tokens)
        return linear_cross_entropy(
            hidden, self.weight, targets, impl=impl, chunk_tokens=chunk_tokens, z_loss=z_loss, softcap=self.softcap
        )

    def losses(self, hidden: Tensor, targets: Tensor, *, chunk_tokens: int) -> Tensor:
        """Cross-entropy of every target, in the shape of ``targets``; 0 where ignored."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            impl="checkpoint",
            chunk_tokens=chunk_tokens,
            softcap=self.softcap,
            reduction="none",
        )
