"""The decoder: Hugging Face's Qwen3 architecture under its parameter names.

Pre-norm blocks of grouped-query attention with RMSNorm on queries and keys, RoPE (rotate-half layout) and SwiGLU,
over one tied table. A block runs as two dense halves with attention between them, because attention follows the
segments of each batch: the halves have fixed shapes and can be compiled, attention need not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stack.config import schema as config
from stack.model.attention import Segments, attend, attend_cached
from stack.model.embedding import Table
from stack.model.loss import Implementation


@dataclass(frozen=True)
class Loss:
    """How the loss is computed; see :func:`stack.model.loss.linear_cross_entropy`."""

    impl: Implementation = "fused"
    chunk_tokens: int = 1024
    z_loss: float = 0.0


@dataclass
class Cache:
    """Keys and values of the positions already seen, per layer ``[B, S, kv_heads, head_dim]``."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


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


class Block(nn.Module):
    """One layer, as the half before attention and the half after it."""

    def __init__(self, c: config.Model):
        super().__init__()
        self.input_layernorm = RMSNorm(c.d, c.norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = RMSNorm(c.d, c.norm_eps)
        self.mlp = MLP(c)

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


class Trunk(nn.Module):
    """What Hugging Face calls ``model``: the table, the blocks and the last norm."""

    def __init__(self, c: config.Model, num_rows: int):
        super().__init__()
        self.embed_tokens = Table(num_rows, c.d, scale_input=c.scale_input, softcap=c.softcap)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.d, c.norm_eps)


class Decoder(nn.Module):
    """The language model.

    Args:
        c: its shape.
        num_rows: rows of the table.
        seed: of the initialization, which draws from a generator of its own.
    """

    def __init__(self, c: config.Model, num_rows: int, *, seed: int = 0):
        super().__init__()
        self.config = c
        with torch.device("meta"):  # PyTorch's own initialization would be lost work, and move the global generator
            trunk = Trunk(c, num_rows)
        self.model = trunk.to_empty(device=torch.get_default_device())
        self.before, self.after = Block.before, Block.after  # compile_blocks() replaces both
        self.reset(seed)

    @property
    def table(self) -> Table:
        """The table, which is embedding and head."""
        return self.model.embed_tokens

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Initializes every parameter: norms 1, matrices N(0, init_std), output projections smaller or zero."""
        c = self.config
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = c.init_std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = 0.0 if c.zero_init else c.init_std / math.sqrt(2 * c.layers)
            parameter.normal_(0.0, std, generator=generator) if std else parameter.zero_()

    def compile_blocks(self) -> None:
        """Compiles the two halves of a block; every layer runs the same code."""
        self.before = torch.compile(Block.before, dynamic=False)
        self.after = torch.compile(Block.after, dynamic=False)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Runs the blocks as they are written: for shapes and modes that come too seldom to compile them for."""
        compiled = self.before, self.after
        self.before, self.after = Block.before, Block.after
        try:
            yield
        finally:
            self.before, self.after = compiled

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[B, T, 1, head_dim / 2]`` float32 of positions ``[B, T]`` int64, whatever autocast says."""
        half = self.config.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        frequency = 1.0 / self.config.rope_theta**exponent
        angle = positions.float()[..., None, None] * frequency
        return angle.cos(), angle.sin()

    def hidden(self, ids: Tensor, positions: Tensor, segments: Segments) -> Tensor:
        """Normalized last hidden states ``[B, T, d]`` of packed windows of ids ``[B, T]`` int64."""
        cos, sin = self.angles(positions)
        x = self.table.embed(ids)
        for block in self.model.layers:
            q, k, v = self.before(block, x, cos, sin)
            x = self.after(block, x, attend(q, k, v, segments))
        return self.model.norm(x)

    def forward(self, ids: Tensor, positions: Tensor, segments: Segments, targets: Tensor, loss: Loss) -> Tensor:
        """Sum of the losses over the supervised targets ``[B, T]``, in nats; a float32 scalar."""
        hidden = self.hidden(ids, positions, segments)
        return self.table.loss(hidden, targets, impl=loss.impl, chunk_tokens=loss.chunk_tokens, z_loss=loss.z_loss)

    def token_losses(
        self, ids: Tensor, positions: Tensor, segments: Segments, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        """The loss of every target ``[B, T]`` in nats, float32; 0 where nothing is supervised."""
        return self.table.losses(self.hidden(ids, positions, segments), targets, chunk_tokens=chunk_tokens)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, rows]`` float32 of whole sequences ``[B, T]``, each one segment."""
        size, length = ids.shape
        positions = torch.arange(length, device=ids.device).expand(size, length)
        return self.table.logits(self.hidden(ids, positions, Segments(((length,),) * size, length, ids.device)))

    def extend(self, ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor) -> Tensor:
        """Hidden states ``[B, T, d]`` of new positions over ``cache``, which takes their keys and values.

        Args:
            ids: ``[B, T]`` int64.
            positions: ``[B, T]`` int64; where in the cache they are written, too.
            cache: as from :meth:`new_cache`.
            mask: ``[B, 1, T, S]`` bool, True where a new position sees a position of the cache.
        """
        cos, sin = self.angles(positions)
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        x = self.table.embed(ids)
        for layer, block in enumerate(self.model.layers):
            q, k, v = block.before(x, cos, sin)
            cache.keys[layer][rows, positions] = k
            cache.values[layer][rows, positions] = v
            x = block.after(x, attend_cached(q, cache.keys[layer], cache.values[layer], mask))
        return self.model.norm(x)

    def new_cache(self, size: int, length: int, dtype: torch.dtype) -> Cache:
        """An empty cache for ``size`` sequences of up to ``length`` tokens."""
        c = self.config
        shape = (size, length, c.kv_heads, c.head_dim)
        device = self.table.weight.device

        def empty() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.layers)]

        return Cache(empty(), empty())
