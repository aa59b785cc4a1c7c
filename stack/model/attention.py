"""Causal attention inside the segments of packed windows.

A window holds several documents; nothing is attended across them. Two back ends compute the same:

``segments``  one call of the fused kernel per segment. Work grows with the squares of the segments' lengths, not of
              the window's, which on CPUs, where no kernel skips masked blocks, is far less.
``mask``      one call with a dense boolean mask ``[B, 1, T, T]``; for devices where many small calls are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the segments of a batch of windows lie.

    Args:
        lengths: per window the lengths of its segments, in order; what is left of the window is padding.
        window: tokens in a window (T).
        device: of the tensors that attend.
        backend: ``segments`` or ``mask``; ``auto`` takes ``segments`` on CPU.
    """

    lengths: tuple[tuple[int, ...], ...]
    window: int
    device: torch.device
    backend: str = "auto"

    @cached_property
    def per_segment(self) -> bool:
        """True for the ``segments`` back end."""
        return self.backend == "segments" or (self.backend == "auto" and self.device.type == "cpu")

    @cached_property
    def pieces(self) -> list[tuple[int, bool]]:
        """``(tokens, is_padding)`` over the flattened ``[B * T]`` positions."""
        found = []
        for lengths in self.lengths:
            found += [(length, False) for length in lengths]
            if (rest := self.window - sum(lengths)) > 0:
                found.append((rest, True))
        return found

    @cached_property
    def mask(self) -> Tensor:
        """``[B, 1, T, T]`` bool, True where a query (third axis) sees a key (last axis)."""
        ids = torch.full((len(self.lengths), self.window), -1)
        for row, lengths in enumerate(self.lengths):
            used = sum(lengths)
            ids[row, :used] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        ids = ids.to(self.device)
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return same & torch.ones(self.window, self.window, dtype=torch.bool, device=self.device).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Grouped-query attention, causal within each segment.

    Args:
        q: ``[B, T, heads, head_dim]``.
        k: ``[B, T, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        v: like ``k``.
        segments: of these B windows.

    Returns:
        ``[B, T, heads, head_dim]``; at padding 0 (``segments``) or an unused value (``mask``).
    """
    if not segments.per_segment:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask, enable_gqa=True).transpose(1, 2)
    sizes = [size for size, _ in segments.pieces]
    # The gradient of split is one concatenation, where slices would each add into a tensor of full size.
    parts = zip(*(x.flatten(0, 1).split(sizes) for x in (q, k, v)), strict=True)
    outputs = [
        torch.zeros_like(a) if padding else _causal(a, b, c)
        for (a, b, c), (_, padding) in zip(parts, segments.pieces, strict=True)
    ]
    return torch.cat(outputs).view(q.shape)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One segment, ``[L, heads, head_dim]``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of new positions over a cache.

    Args:
        q: ``[B, T, heads, head_dim]``, the new positions.
        k: ``[B, S, kv_heads, head_dim]``, the cache with the new keys in it.
        v: like ``k``.
        mask: ``[B, 1, T, S]`` bool, True where a query sees a key.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
