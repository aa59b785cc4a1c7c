"""Wrapping a model for ranks, and sharing the windows of a step among them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stack.core.ranks import Ranks


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The module to call for the loss: ``model`` itself, or DDP around it, which averages gradients over ranks."""
    if ranks.world == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def unsynchronized(wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Keeps gradients on the rank until the ``last`` micro-batch of a step."""
    return nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()


def shard(windows: np.ndarray, micro_batch: int, ranks: Ranks) -> list[np.ndarray]:
    """The micro-batches of this rank: window numbers of one step, at most ``micro_batch`` in each.

    Every rank gets the same number of micro-batches, because every backward pass of the last one is a collective;
    where windows are too few, some of them are empty and stand for a padded window.
    """
    parts = np.array_split(windows, ranks.world)
    count = -(-max(len(part) for part in parts) // micro_batch)
    mine = parts[ranks.rank]
    return [mine[i * micro_batch : (i + 1) * micro_batch] for i in range(count)]
