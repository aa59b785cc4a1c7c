"""Validation: nats per token, bits per byte and the loss of every source over the whole held-out split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stack.data.batches import IGNORED, Batch, Windows
from stack.distributed import Ranks
from stack.model.attention import Segments
from stack.model.transformer import Decoder


@dataclass(frozen=True)
class Validation:
    """What one pass over the split found, by source."""

    nats: dict[str, float]  # sums over all targets
    num_targets: dict[str, int]
    num_bytes: int | None  # of the UTF-8 text of the whole split, where every token of it is a target

    @property
    def loss(self) -> float:
        """Nats per token: a mean over tokens, never a mean of means."""
        return sum(self.nats.values()) / max(1, sum(self.num_targets.values()))

    @property
    def bits_per_byte(self) -> float | None:
        """Independent of the vocabulary, so it compares tokenizers, too."""
        return None if self.num_bytes is None else sum(self.nats.values()) / (math.log(2) * self.num_bytes)

    def figures(self) -> dict[str, float]:
        """``loss``, ``bits_per_byte`` where it means something, and ``loss_SOURCE`` where there is more than one."""
        found = {"loss": self.loss}
        if self.bits_per_byte is not None:
            found["bits_per_byte"] = self.bits_per_byte
        if len(self.nats) > 1:
            found |= {f"loss_{name}": self.nats[name] / n for name, n in self.num_targets.items() if n}
        return found


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
    model: Decoder,
    windows: Windows,
    num_bytes: int | None,
    *,
    micro_batch: int,
    chunk_tokens: int,
    ranks: Ranks,
    device: str,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Validation:
    """One pass over every window, shared among ranks; the loss is cross-entropy alone, without the z-loss.

    Args:
        model: the decoder, not wrapped for ranks.
        windows: the validation split's.
        num_bytes: UTF-8 bytes of the split's text, for bits per byte.
        micro_batch: windows in one forward pass.
        chunk_tokens: tokens whose logits exist at one time.
        ranks: each takes every ``world``-th micro-batch; sums are added over them.
        device: where the model is.
        progress: hears after each micro-batch how many windows are done, of how many.
    """
    sources = windows.split.sources
    nats, counts = np.zeros(len(sources)), np.zeros(len(sources))
    for number, start in enumerate(range(0, windows.num_windows, micro_batch)):
        if number % ranks.world != ranks.rank:
            continue
        batch = windows.batch(range(start, min(start + micro_batch, windows.num_windows)))
        ids, positions, segments, targets = to_device(batch, device)
        with model.uncompiled():
            losses = model.token_losses(ids, positions, segments, targets, chunk_tokens).double().cpu().numpy()
        source = source_of_targets(windows, batch)
        nats += np.bincount(source[source >= 0], losses[source >= 0], minlength=len(sources))
        counts += np.bincount(source[source >= 0], minlength=len(sources))
        progress(start + len(batch.ids), windows.num_windows)
    sums = ranks.sum(*nats, *counts)
    return Validation(
        dict(zip(sources, sums[: len(sources)], strict=True)),
        {name: int(count) for name, count in zip(sources, sums[len(sources) :], strict=True)},
        num_bytes,
    )


def source_of_targets(windows: Windows, batch: Batch) -> np.ndarray:
    """The number of the source that every target is of, int64 ``[B, T]``; -1 where nothing is supervised."""
    source = np.full(batch.ids.shape, -1)
    for row, (documents, lengths) in enumerate(zip(batch.documents, batch.lengths, strict=True)):
        source[row, : sum(lengths)] = np.repeat(windows.split.source_of[list(documents)], lengths)
    source[batch.targets.numpy() == IGNORED] = -1
    return source
