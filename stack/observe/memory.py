"""Where the memory of a training step goes: the plan, by part, before any work.

What autograd keeps per token is not guessed from a formula but counted: one block runs on a few tokens while every
tensor that is saved for the backward pass is added up. All parts are bytes.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from stack.config import schema as config
from stack.core import machine
from stack.core.errors import UserError
from stack.core.ranks import Ranks
from stack.model.attention import Segments
from stack.model.decoder import Decoder

_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, at one micro-batch and window."""

    parameters: int
    gradients: int
    moments: int
    copies: int  # of the matrices in bfloat16, which autocast makes once in a forward pass and keeps for the backward
    activations: int  # kept by all blocks for the backward pass
    backward: int  # gradients of activations that live at one time, and the table's, which waits for the embedding's
    loss: int  # logits, gradient of the table in float32, gradient of the hidden states
    step: int  # what the optimizer needs for a moment, when activations are gone
    holes: int  # on a CPU: freed, yet neither given back nor taken again

    @property
    def tensors(self) -> int:
        """All tensors at the highest point of a step."""
        passing = self.copies + self.activations + max(self.loss, self.backward)
        return self.parameters + self.gradients + self.moments + max(passing, self.step)

    @property
    def peak(self) -> int:
        """The highest point of a step: what the device has allocated, or what is resident on a CPU."""
        return self.tensors + self.holes

    def lines(self) -> list[str]:
        """One line a part, for people."""
        return [f"{name:<12}{getattr(self, name) / 1e9:8.2f} GB" for name in (*(f.name for f in fields(self)), "peak")]


# glibc aligns a block by taking a larger one, so a freed block is too small for the next of its size unless a
# neighbour is free, too. Not derived but measured (runs/LOG.md): of what comes and goes, 0.5 to 0.95 by
# shape is lost to holes.
_HOLES = 0.7


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
    parts = parameters_by_part(m, num_rows)
    hidden = parts["attention"] + parts["mlp"]
    parameters = _FLOAT32 * sum(parts.values())
    dtype = machine.choose_precision(c.precision, device)
    low = 0 if dtype == torch.float32 else dtype.itemsize
    layer, ends = _saved_per_token(m, dtype)
    activations = tokens * (m.layers * layer + ends)
    if device != "cpu":
        # The dense mask, and its copy in the dtype of the queries that every call of the kernel makes and keeps.
        activations += micro_batch * c.train.window**2 * (1 + m.layers * dtype.itemsize)
    # Muon stacks the matrices of one shape; gate_proj and up_proj of all layers are the largest stack.
    step = 2 * m.layers * m.d * m.ffn * (_FLOAT32 + 3 * dtype.itemsize) if c.optim.kind == "muon" else 0
    return MemoryPlan(
        parameters=parameters,
        gradients=parameters,
        moments=checkpoint_bytes(m, c.optim, num_rows) - parameters,
        copies=low * hidden,
        activations=activations,
        backward=tokens * (3 * m.ffn + 2 * m.d) * _FLOAT32 + table * _FLOAT32,
        loss=loss_memory(c.train, c.train.loss, tokens, num_rows, m.d, dtype, capped=m.softcap is not None),
        step=step,
        holes=int(_HOLES * (activations + parameters + step)) if device == "cpu" else 0,
    )


def parameters_by_part(m: config.Model, num_rows: int) -> dict[str, int]:
    """How many parameters are in the table, attention, the MLPs and the norms."""
    return {
        "table": num_rows * m.d,
        "attention": m.layers * 2 * m.d * (m.heads + m.kv_heads) * m.head_dim,
        "mlp": m.layers * 3 * m.d * m.ffn,
        "norms": m.layers * (2 * m.d + (2 * m.head_dim if m.qk_norm else 0)) + m.d,
    }


def checkpoint_bytes(m: config.Model, c: config.Optim, num_rows: int) -> int:
    """Bytes of a checkpoint's tensors: weights and moments, float32."""
    parts = parameters_by_part(m, num_rows)
    momentum = parts["attention"] + parts["mlp"] if c.kind == "muon" else 0  # these have one moment, the others two
    return _FLOAT32 * (3 * sum(parts.values()) - momentum)


def recomputed(m: config.Model, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations if blocks kept their inputs alone and ran again in the backward pass, one at a time."""
    layer, ends = _saved_per_token(m, dtype)
    return tokens * (m.layers * m.d * _FLOAT32 + layer + ends)


def loss_memory(
    t: config.Train, impl: str, tokens: int, num_rows: int, d: int, dtype: torch.dtype, *, capped: bool = False
) -> int:
    """Bytes that one implementation of the loss needs at its highest point, beyond hidden states and table.

    Counted in tensors of :mod:`stack.model.loss`. The full way keeps the log-softmax and makes two gradients of it in
    float32; the z-loss keeps the logits and makes one more, a cap keeps them before it. A chunk has its logits in the
    GEMM's dtype and in float32 (one buffer where these are the same), behind a cap three float32 ones more.
    """
    low = 0 if dtype == torch.float32 else dtype.itemsize
    if impl == "full":
        kept = 3 + 2 * (t.z_loss > 0) + capped
        return tokens * num_rows * kept * _FLOAT32 + tokens * d * low + num_rows * d * low
    chunk = chunk_logits(t, tokens, num_rows, dtype, capped=capped)
    # The table's gradient; where GEMMs are bfloat16 its copy for them, a chunk's product, and that in float32.
    of_table = num_rows * d * (2 * (_FLOAT32 + low) if low else _FLOAT32)
    return chunk + of_table + tokens * d * (2 * low or _FLOAT32)


def chunk_logits(t: config.Train, tokens: int, num_rows: int, dtype: torch.dtype, *, capped: bool = False) -> int:
    """Bytes of the logits that exist at one time, in the GEMM's dtype and in float32; see :func:`loss_memory`."""
    low = 0 if dtype == torch.float32 else dtype.itemsize
    return min(t.chunk_tokens, tokens) * num_rows * (_FLOAT32 * (1 + 3 * capped) + low)


def largest_micro_batch(m: config.Model, c: config.Run, num_rows: int, device: str, free: int) -> int:
    """The most windows whose plan fits into ``free`` bytes; 0 where none does."""
    sizes = range(1, c.train.global_batch + 1)  # the peak grows with the size, so it can be halved in on
    return bisect.bisect_right(sizes, free, key=lambda size: plan_memory(m, c, num_rows, device, size).peak)


@functools.cache
def _saved_per_token(m: config.Model, dtype: torch.dtype, tokens: int = 64) -> tuple[int, int]:
    """Bytes kept per token for the backward pass: by one block, and by what stands before and after all of them."""
    ids, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
    alone = Segments(((tokens,),), tokens, ids.device, "segments")
    found = []
    for layers in (1, 2):
        model = Decoder(config.Model(**{**m.__dict__, "layers": layers}), 64)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            found.append(kept_bytes(model, ids, positions, alone) // tokens)
    layer = found[1] - found[0]
    return layer, found[0] - layer


def kept_bytes(model: Decoder, ids: torch.Tensor, positions: torch.Tensor, segments: Segments) -> int:
    """Bytes of all activations that a forward pass up to the hidden states keeps for its backward pass.

    Every storage counts once. Parameters do not count, nor do autocast's copies of them.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights = {tuple(sorted(p.shape)) for p in model.parameters() if p.dim() == 2}
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        copy = (
            x.dtype == torch.bfloat16 and x.dim() == 2 and not x.is_contiguous() and tuple(sorted(x.shape)) in weights
        )
        if storage.data_ptr() not in own and not copy and x.numel() >= ids.numel():
            saved[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # an output that is kept as it is would keep its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model.hidden(ids, positions, segments)
    del hidden
    return sum(saved.values())


def measure(model: Decoder, moments: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Bytes of the parts of a plan that can be measured apart; ``inputs`` is a batch's, on its device."""
    ids, positions, segments, _ = inputs
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "moments": sum(x.nbytes for x in moments.values() if x.dim()),
        "activations": kept_bytes(model, ids, positions, segments),
    }


def check_memory(
    m: config.Model, c: config.Run, num_rows: int, device: str, ranks: Ranks, show: Callable[[str], None]
) -> None:
    """Holds the plan against what is free before anything is built.

    Raises:
        UserError: it does not fit; with the parts, and the largest micro-batch that would.
    """
    machine.program_memory()  # what is measured from here on is the model's
    plan = plan_memory(m, c, num_rows, device, c.train.largest_forward(ranks.world))
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
