"""Validation: nats per token and bits per byte over the whole held-out split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stack.data.batches import Batch, Windows
from stack.distributed import Ranks
from stack.model.attention import Segments
from stack.model.transformer import Decoder, Loss


@dataclass(frozen=True)
class Validation:
    """What one pass over the split found."""

    nats: float  # sum over all targets
    num_targets: int
    num_bytes: int  # of the UTF-8 text of the whole split

    @property
    def loss(self) -> float:
        """Nats per token: a mean over tokens, never a mean of means."""
        return self.nats / self.num_targets

    @property
    def bits_per_byte(self) -> float:
        """Independent of the vocabulary, so it compares tokenizers, too."""
        return self.nats / (math.log(2) * self.num_bytes)


def to_device(batch: Batch, device: str) -> tuple[torch.Tensor, torch.Tensor, Segments, torch.Tensor]:
    """``ids, positions, segments, targets`` of a batch, as the model takes them."""
    where = torch.device(device)
    if where.type == "cuda":
        ids, positions, targets = (
            x.pin_memory().to(where, non_blocking=True) for x in (batch.ids, batch.positions, batch.targets)
        )
    else:
        ids, positions, targets = (x.to(where) for x in (batch.ids, batch.positions, batch.targets))
    return ids, positions, Segments(batch.lengths, batch.ids.shape[1], where), targets


@torch.no_grad()
def validate(
    model: Decoder, windows: Windows, num_bytes: int, *, micro_batch: int, chunk_tokens: int, ranks: Ranks, device: str
) -> Validation:
    """One pass over every window, shared among ranks; the loss is cross-entropy alone, without the z-loss.

    Args:
        model: the decoder, not wrapped for ranks.
        windows: the validation split's.
        num_bytes: UTF-8 bytes of the split's text.
        micro_batch: windows in one forward pass.
        chunk_tokens: tokens whose logits exist at one time.
        ranks: each takes every ``world``-th micro-batch; sums are added over them.
        device: where the model is.
    """
    loss = Loss("fused", chunk_tokens, 0.0)
    nats = torch.zeros((), dtype=torch.float64)
    count = 0
    for number, start in enumerate(range(0, windows.num_windows, micro_batch)):
        if number % ranks.world != ranks.rank:
            continue
        batch = windows.batch(range(start, min(start + micro_batch, windows.num_windows)))
        ids, positions, segments, targets = to_device(batch, device)
        with model.uncompiled():
            nats += model(ids, positions, segments, targets, loss).double().cpu()
        count += batch.num_targets
    nats_sum, count_sum = ranks.sum(nats.item(), count)
    return Validation(nats_sum, int(count_sum), num_bytes)
