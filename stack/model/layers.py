"""The layers of the decoder: norms, attention's projections, SwiGLU, and the block that is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.config import schema as config
from stack.model.attention import Segments, attend


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class SelfAttention(nn.Module):
    """The four projections, and the norms of queries and keys."""

    def __init__(self, c: config.Model):
        super().__init__()
        self.q_proj = nn.Linear(c.d, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.d, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.d, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.d, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.head_dim = c.head_dim


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer, 2020)."""

    def __init__(self, c: config.Model):
        super().__init__()
        self.gate_proj = nn.Linear(c.d, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.d, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, d]`` → ``[B, T, d]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Halves:
    """What computes the dense halves of every block: as they are written, or compiled. All blocks share one."""

    def __init__(self) -> None:
        self.before, self.after = Block.before, Block.after

    def compile(self) -> None:
        """Compiles both; every layer runs the same code."""
        self.before = torch.compile(Block.before, dynamic=False)
        self.after = torch.compile(Block.after, dynamic=False)

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Runs them as they are written: for shapes and modes that come too seldom to compile them for."""
        compiled = self.before, self.after
        self.before, self.after = Block.before, Block.after
        try:
            yield
        finally:
            self.before, self.after = compiled


class Block(nn.Module):
    """One layer: a dense half before attention and one after it.

    Attention follows the segments of each batch, so it is not compiled; the halves have fixed shapes and can be.
    """

    def __init__(self, c: config.Model, halves: Halves):
        super().__init__()
        self.halves = halves
        self.input_layernorm = RMSNorm(c.d, c.norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = RMSNorm(c.d, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """Residual stream ``[B, T, d]`` → residual stream."""
        q, k, v = self.halves.before(self, x, *angles)
        return self.halves.after(self, x, attend(q, k, v, segments))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, d]`` → queries ``[B, T, heads, head_dim]``, keys and values ``[B, T, kv_heads, head_dim]``."""
        a = self.self_attn
        x = self.input_layernorm(x)
        q, k, v = (proj(x).unflatten(-1, (-1, a.head_dim)) for proj in (a.q_proj, a.k_proj, a.v_proj))
        return rotate(a.q_norm(q), cos, sin), rotate(a.k_norm(k), cos, sin), v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream ``[B, T, d]`` and attention's output ``[B, T, heads, head_dim]`` → residual stream."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al., 2021) in the rotate-half layout: ``x`` ``[B, T, H, D]``, angles ``[B, T, 1, D / 2]`` float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
