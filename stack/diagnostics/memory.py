"""Where the memory of a training step goes: the plan, by part, before any work.

What autograd keeps per token is not guessed from a formula but counted: one block runs on a few tokens while every
tensor that is saved for the backward pass is added up. All parts are bytes.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stack import config, machine
from stack.config import UserError
from stack.model.attention import Segments
from stack.model.transformer import Decoder

_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, at one micro-batch and window."""

    device: str
    parameters: int
    gradients: int
    moments: int
    activations: int  # kept by all blocks for the backward pass
    backward: int  # the largest gradients of activations that live at one time
    loss: int  # chunk of logits, gradient of the table in float32, gradient of the hidden states
    step: int  # what the optimizer needs for a moment, when activations are gone

    @property
    def peak(self) -> int:
        """The highest point of a step: what the device has allocated, or what is resident on a CPU."""
        moving = self.activations + max(self.loss, self.backward)
        if self.device == "cpu":
            # glibc gives little of what is freed back to the system, and what the optimizer takes at once does not fit
            # into the holes: the two add up. Two fifths are lost between blocks (measured, after a few steps).
            moving += self.activations * 2 // 5 + self.step
        return self.parameters + self.gradients + self.moments + max(moving, self.step)

    def lines(self) -> list[str]:
        """One line a part, for people."""
        parts = ("parameters", "gradients", "moments", "activations", "backward", "loss", "step")
        return [f"{name:<12}{getattr(self, name) / 1e9:8.2f} GB" for name in (*parts, "peak")]


def plan_memory(m: config.Model, c: config.Run, num_rows: int, device: str, micro_batch: int) -> MemoryPlan:
    """The memory of one step of one rank, as this configuration trains (not compiled: an upper bound if it is).

    Args:
        m: the model's shape.
        c: the configuration.
        num_rows: rows of the table.
        device: ``cpu``, ``cuda`` or ``mps``.
        micro_batch: windows in one forward pass.
    """
    tokens = micro_batch * c.train.window
    table = num_rows * m.d
    matrices = 2 * m.d * m.heads * m.head_dim + 2 * m.d * m.kv_heads * m.head_dim + 3 * m.d * m.ffn
    vectors = 2 * m.d + (2 * m.head_dim if m.qk_norm else 0)
    hidden = m.layers * matrices
    parameters = _FLOAT32 * (table + hidden + m.layers * vectors + m.d)
    dtype = machine.choose_precision(c.precision, device)
    gemm = dtype.itemsize
    chunk = tokens if c.train.loss == "full" else min(c.train.chunk_tokens, tokens)
    logits = chunk * num_rows
    # Logits and one temporary in float32, and the copy that the GEMM takes; the full way keeps the softmax as well.
    of_logits = logits * (3 * _FLOAT32 if c.train.loss == "full" else 2 * _FLOAT32)
    of_logits += logits * gemm if dtype != torch.float32 else 0
    return MemoryPlan(
        device=device,
        parameters=parameters,
        gradients=parameters,
        moments=parameters * 2 - (_FLOAT32 * hidden if c.optim.kind == "muon" else 0),
        activations=m.layers * tokens * _saved_per_token(m, dtype) + 2 * _FLOAT32 * tokens * m.d,
        backward=tokens * (3 * m.ffn + 2 * m.d) * _FLOAT32,
        loss=of_logits
        + table * (_FLOAT32 + (gemm if dtype != torch.float32 else 0))
        + tokens * m.d * (_FLOAT32 + gemm),
        # Muon stacks the matrices of one shape; gate_proj and up_proj of all layers are the largest stack.
        step=2 * m.layers * m.d * m.ffn * (_FLOAT32 + 3 * gemm) if c.optim.kind == "muon" else 0,
    )


def largest_micro_batch(m: config.Model, c: config.Run, num_rows: int, device: str, free: int) -> int:
    """The most windows whose plan fits into ``free`` bytes; 0 where none does."""
    sizes = range(1, c.train.global_batch + 1)  # the peak grows with the size, so it can be halved in on
    return bisect.bisect_right(sizes, free, key=lambda size: plan_memory(m, c, num_rows, device, size).peak)


@functools.cache
def _saved_per_token(m: config.Model, dtype: torch.dtype, tokens: int = 64) -> int:
    """Bytes that one block keeps per token for its backward pass."""
    shape = config.Model(**{**m.__dict__, "layers": 1})
    model = Decoder(shape, 64)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and x.numel() >= tokens:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    alone = Segments(((tokens,),), tokens, ids.device, "segments")
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.hidden(ids, torch.arange(tokens)[None], alone).sum()
    weights = sum(p.numel() * dtype.itemsize for p in model.model.layers[0].parameters() if p.dim() == 2)
    cast = weights if dtype == torch.bfloat16 else 0  # autocast's copies of the weights are no activations
    return max(0, sum(saved.values()) - cast) // tokens


def check_memory(m: config.Model, c: config.Run, num_rows: int, device: str, show: Callable[[str], None]) -> None:
    """Holds the plan against what is free before anything is built.

    Raises:
        UserError: it does not fit; with the parts, and the largest micro-batch that would.
    """
    plan = plan_memory(m, c, num_rows, device, min(c.train.micro_batch, c.train.global_batch))
    sharing = 1 if device == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = machine.free_memory(device) // sharing
    show(f"memory: {plan.peak / 1e9:.2f} GB planned for a step, {free / 1e9:.2f} GB free")
    if plan.peak > free:
        fits = largest_micro_batch(m, c, num_rows, device, free)
        way = f"train.micro_batch={fits} would fit" if fits else "not even train.micro_batch=1 fits; lower train.window"
        lines = "\n".join(f"  {line}" for line in plan.lines())
        raise UserError(
            f"train.micro_batch={c.train.micro_batch} needs {plan.peak / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
            f"{way}\n{lines}"
        )
