"""What a token costs: FLOPs by convention, and from them hours and money.

A multiply-add is two FLOPs, and the backward pass costs twice the forward pass, so a parameter in a GEMM costs six a
token (Kaplan et al., 2020). The table counts once, as the head's GEMM; a lookup is none. What is computed twice, as
with blocks that are recomputed, does not count: utilization is of the model's FLOPs (Chowdhery et al., 2022).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from stack.config import schema as config
from stack.observe.memory import parameters_by_part


@dataclass(frozen=True)
class Flops:
    """FLOPs of training on one token, three ways that others quote; always say which."""

    dense: int  # the GEMMs with parameters: 6 a parameter
    causal: int  # and attention over the half of the window that a causal mask leaves
    full: int  # and attention over the whole window: 12 * layers * heads * head_dim * window (PaLM, appendix B)


def flops_per_token(m: config.Model, num_rows: int, window: int) -> Flops:
    """FLOPs of one token of a window that is one document; packed documents that are shorter attend to less."""
    parts = parameters_by_part(m, num_rows)
    dense = 6 * (parts["table"] + parts["attention"] + parts["mlp"])
    attention = 12 * m.layers * m.heads * m.head_dim * window
    return Flops(dense, dense + attention // 2, dense + attention)


def training_seconds(tokens: float, flops: int, peak: float, mfu: float) -> float:
    """Seconds for ``tokens`` at a share ``mfu`` of ``peak`` FLOP/s, which counts ``flops`` a token."""
    return tokens * flops / (peak * mfu)


def measured_peak(m: config.Model, device: str, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """FLOP/s of the model's largest GEMM on this device, as fast as it was within some seconds."""
    rows = 2048
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, m.d), (m.d, m.ffn)))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        begin = time.perf_counter()
        a @ b
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * rows * m.d * m.ffn / best
