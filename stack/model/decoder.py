"""The decoder: Hugging Face's Qwen3 architecture under its parameter names.

Pre-norm blocks of grouped-query attention with RMSNorm on queries and keys, RoPE (rotate-half layout) and SwiGLU,
over one tied table.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stack.config import schema as config
from stack.model.attention import Segments, attend_cached
from stack.model.embedding import Embedding, RowParameter
from stack.model.layers import Block, Halves, RMSNorm
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


class Trunk(nn.Module):
    """What Hugging Face calls ``model``: the table, the blocks and the last norm."""

    def __init__(self, c: config.Model, num_rows: int):
        super().__init__()
        self.halves = Halves()
        self.embed_tokens = Embedding(num_rows, c.d, scale_input=c.scale_input, softcap=c.softcap)
        self.layers = nn.ModuleList(Block(c, self.halves) for _ in range(c.layers))
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
        self.reset(seed)

    @property
    def table(self) -> Embedding:
        """The table, which is embedding and head."""
        return self.model.embed_tokens

    def row_parameters(self) -> list[RowParameter]:
        """Every tensor with a row for each id."""
        return self.table.row_parameters()

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
        """Compiles the halves of the blocks; see :class:`stack.model.layers.Halves`."""
        self.model.halves.compile()

    def uncompiled(self) -> AbstractContextManager[None]:
        """Runs the blocks as they are written."""
        return self.model.halves.as_written()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[B, T, 1, head_dim / 2]`` float32 of positions ``[B, T]`` int64, whatever autocast says."""
        half = self.config.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        frequency = 1.0 / self.config.rope_theta**exponent
        angle = positions.float()[..., None, None] * frequency
        return angle.cos(), angle.sin()

    def hidden(self, ids: Tensor, positions: Tensor, segments: Segments) -> Tensor:
        """Normalized last hidden states ``[B, T, d]`` of packed windows of ids ``[B, T]`` int64."""
        angles = self.angles(positions)
        x = self.table.embed(ids)
        for block in self.model.layers:
            x = block(x, angles, segments)
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
        device = self.table.device

        def empty() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.layers)]

        return Cache(empty(), empty())
