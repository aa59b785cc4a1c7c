"""Rows of a changed vocabulary: weights and moments, each row by its id."""

from __future__ import annotations

import torch
from torch import Tensor

from stack.model.embedding import row_parameters_of
from stack.vocabulary.change import Growth


def migrate(
    growth: Growth, weights: dict[str, Tensor], moments: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments of the grown table; everything that has no rows of it is passed on as it is.

    Args:
        growth: of this base.
        weights: by parameter name, the table once, as :class:`stack.checkpoint.open.Base` has them.
        moments: ``KIND/PARAMETER``; AdamW's step stays, so that the bias of young moments is not corrected twice.

    Returns:
        New dictionaries. Old rows are bit-equal; initialized ones are the mean (computed in float64) of the live old
        rows in the weights, and zero in the moments.
    """
    grown, moved = dict(weights), dict(moments)
    for rows in row_parameters_of(weights):
        mean = rows.tensor[list(growth.live)].double().mean(0).to(rows.tensor.dtype)
        grown[rows.name] = _grow(growth, rows.tensor, mean)
        zero = torch.zeros((), dtype=rows.tensor.dtype)
        for key, value in moments.items():
            if key.partition("/")[2] == rows.name and value.dim() > 0:
                moved[key] = _grow(growth, value, zero)
    return grown, moved


def _grow(growth: Growth, old: Tensor, value: Tensor) -> Tensor:
    """``[old_rows, d]`` → ``[new_rows, d]`` with ``value`` in the initialized rows."""
    assert old.shape[0] == growth.old_rows, f"{old.shape[0]} rows, {growth.old_rows} are to grow"
    new = old.new_empty(growth.new_rows, *old.shape[1:])
    new[: growth.old_rows] = old
    new[list(growth.initialized)] = value.to(old.dtype)
    return new
