"""The table and every use of it, as embedding and as head (Press & Wolf, 2017).

What has a row for each id is known here alone. Optimizers, growth, checkpoints, audits and diagnostics ask for it
(:meth:`Embedding.row_parameters`, :func:`row_parameters_of`), so another kind of table is another class in this file.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.model.loss import Implementation, linear_cross_entropy

INPUT, OUTPUT = NAMES = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names of the two uses
ALIASES = {OUTPUT: INPUT}  # names that stand for a tensor stored under another one
Role = Literal["input", "output", "both"]


@dataclass(frozen=True)
class RowParameter:
    """A tensor with a row for each id."""

    name: str  # in a checkpoint
    tensor: Tensor  # [rows, d]
    role: Role


def row_names(names: Container[str]) -> dict[str, Role]:
    """Which names of a checkpoint's tensors have a row for each id, and what for."""
    return {INPUT: "input", OUTPUT: "output"} if OUTPUT in names else {INPUT: "both"}


def row_parameters_of(weights: Mapping[str, Tensor]) -> list[RowParameter]:
    """What has a row for each id among weights by name, as a checkpoint has them."""
    return [RowParameter(name, weights[name], role) for name, role in row_names(weights).items()]


class TableObserver(Protocol):
    """Sees every use of the table in a training step, and changes no bit of it."""

    def embedded(self, ids: Tensor, rows: Tensor) -> None:
        """The ``rows`` ``[B, T, d]`` of ``ids`` ``[B, T]``, before they are scaled; their gradient can be hooked."""

    def scored(self, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> None:
        """The hidden states ``[B, T, d]`` that are scored against every row, and the targets ``[B, T]``."""


class Embedding(nn.Module):
    """A tied table: one row per id. The head is the same parameter, so that nothing can untie them.

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
        self.observer: TableObserver | None = None

    def row_parameters(self) -> list[RowParameter]:
        """Every tensor with a row for each id."""
        return [RowParameter(INPUT, self.weight, "both")]

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.weight)

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.weight.device

    def embed(self, ids: Tensor) -> Tensor:
        """``[B, T]`` int64 → ``[B, T, d]`` float32."""
        rows = F.embedding(ids, self.weight)
        if self.observer is not None:
            self.observer.embedded(ids, rows)
        return rows if self.scale == 1.0 else rows * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., d]`` → ``[..., rows]`` float32."""
        logits = F.linear(hidden, self.weight).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(
        self, hidden: Tensor, targets: Tensor, *, impl: Implementation, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        """Sum of the losses of the supervised tokens; see :func:`stack.model.loss.linear_cross_entropy`."""
        if self.observer is not None:
            self.observer.scored(hidden, targets, chunk_tokens)
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
