"""Linear cross-entropy: the loss of ``hidden @ weight.T`` without ever holding all of the logits.

Three implementations compute the same number behind one signature:

``full``        plain autograd over all logits ``[N, V]``; the reference.
``checkpoint``  chunk by chunk; the backward pass computes each chunk's logits a second time (4 GEMMs a chunk).
``fused``       chunk by chunk; the gradient is made during the forward pass (3 GEMMs a chunk), which fixes the
                upstream gradient to one number, so ``reduction="none"`` is refused.

GEMMs run in the dtype of autocast where it is on, else in the dtype of ``hidden``. Softmax, losses and every sum
over chunks are float32 (float64 for float64 inputs), so the gradient of the head does not lose bits as the number
of chunks grows. The gradient of a logit is ``p - onehot``, with the z-loss ``z * logsumexp²`` (PaLM, section 5)
``p * (1 + 2 * z * logsumexp) - onehot``, times ``1 - (logit / softcap)²`` behind a cap.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Implementation = Literal["full", "checkpoint", "fused"]
Reduction = Literal["sum", "mean", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    impl: Implementation,
    chunk_tokens: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Cross-entropy between ``softmax(hidden @ weight.T)`` and ``targets``, in nats.

    Args:
        hidden: ``[..., d]`` float32, bfloat16 or float64.
        weight: ``[V, d]``, the rows of the table.
        targets: ``[...]`` int64, below V, or ``ignore_index`` where nothing is supervised.
        impl: see the module's text.
        chunk_tokens: tokens whose logits exist at one time (``full`` takes all).
        ignore_index: the target of a token that has no loss.
        z_loss: factor of ``logsumexp(logits)²``, added to the loss of each supervised token.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        reduction: ``sum``; ``mean`` over the supervised tokens (0 where there is none); ``none``, the shape of
            ``targets``, 0 where ignored.

    Returns:
        A scalar, or the shape of ``targets`` for ``none``; float32 (float64 for float64 inputs).

    Raises:
        ValueError: unknown ``impl`` or ``reduction``, ``chunk_tokens < 1``, shapes that do not fit, or ``fused``
            with ``reduction="none"``.
    """
    _check(hidden, weight, targets, impl, chunk_tokens, reduction)
    flat, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    dtype = _gemm_dtype(hidden)
    supervised = ids != ignore_index
    ids = ids.masked_fill(~supervised, 0)
    if impl == "full":
        losses = _full(flat, weight, ids, dtype, z_loss, softcap) * supervised
    else:
        losses = _Chunked.apply(flat, weight, ids, supervised, dtype, chunk_tokens, z_loss, softcap, impl == "fused")
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / supervised.sum().clamp(min=1)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, impl: str, chunk_tokens: int, reduction: str) -> None:
    if impl not in ("full", "checkpoint", "fused"):
        raise ValueError(f"impl={impl!r}: must be full, checkpoint or fused")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}: must be sum, mean or none")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1")
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} "
            "do not fit: [..., d], [V, d] and [...] are needed"
        )
    if impl == "fused" and reduction == "none":
        raise ValueError(
            "impl='fused' makes the gradient before the upstream gradient of each token is known, so it cannot "
            "differentiate reduction='none' exactly; use impl='checkpoint' or reduction='sum'"
        )


def _gemm_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _accurate(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _full(hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype, z: float, cap: float | None) -> Tensor:
    logits = _accurate(F.linear(hidden.to(dtype), weight.to(dtype)))
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, ids, reduction="none")
    return losses + z * torch.logsumexp(logits, -1).square() if z else losses


class _Chunked(torch.autograd.Function):
    """Losses ``[N]`` chunk by chunk.

    With ``fused`` the gradients for an upstream gradient of 1 are made along the way; the caller sums the losses, so
    that the upstream gradient is one number for all tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        supervised: Tensor,
        dtype: torch.dtype,
        chunk: int,
        z: float,
        cap: float | None,
        fused: bool,
    ) -> Tensor:
        h, w = hidden.to(dtype), weight.to(dtype)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grads = _Gradients(h, w) if fused and wanted else None
        losses, lses = [], []
        for part in _chunks(len(ids), chunk):
            logits = _logits(h[part], w, cap)
            lse = torch.logsumexp(logits, -1)
            target = logits.gather(-1, ids[part, None]).squeeze(-1)
            losses.append((lse - target + z * lse.square() if z else lse - target) * supervised[part])
            lses.append(lse)
            if grads is not None:
                grads.add(part, logits, lse, ids[part], supervised[part].to(lse.dtype), z, cap)
            del logits
        ctx.fused, ctx.chunk, ctx.z, ctx.cap, ctx.dtype = fused, chunk, z, cap, dtype
        if fused and wanted:
            ctx.save_for_backward(grads.hidden.to(hidden.dtype), grads.weight.to(weight.dtype))
        elif wanted:
            ctx.save_for_backward(hidden, weight, ids, supervised, _cat(lses, h))
        return _cat(losses, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rest = (None,) * 7
        if ctx.fused:
            hidden_grad, weight_grad = ctx.saved_tensors
            factor = upstream[:1].sum()  # one number for all tokens: the losses are summed
            return hidden_grad * factor, weight_grad * factor, *rest
        hidden, weight, ids, supervised, lse = ctx.saved_tensors
        h, w = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        grads = _Gradients(h, w)
        for part in _chunks(len(ids), ctx.chunk):
            logits = _logits(h[part], w, ctx.cap)
            grads.add(part, logits, lse[part], ids[part], upstream[part] * supervised[part], ctx.z, ctx.cap)
            del logits
        return grads.hidden.to(hidden.dtype), grads.weight.to(weight.dtype), *rest


class _Gradients:
    """The two gradients while chunks are added: hidden ``[N, d]`` in the GEMM's dtype, weight ``[V, d]`` float32."""

    def __init__(self, h: Tensor, w: Tensor):
        self.h, self.w = h, w
        self.hidden = torch.empty_like(h)
        self.weight = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))

    def add(
        self, part: slice, logits: Tensor, lse: Tensor, ids: Tensor, upstream: Tensor, z: float, cap: float | None
    ) -> None:
        """Adds one chunk; overwrites ``logits`` where no cap needs them."""
        slope = None if cap is None else 1 - (logits / cap).square()
        p = logits.sub_(lse[:, None]).exp_()
        p.mul_((upstream * (1 + 2 * z * lse) if z else upstream)[:, None])
        p.scatter_add_(-1, ids[:, None], -upstream[:, None])
        if slope is not None:
            p.mul_(slope)
        p = p.to(self.h.dtype)
        torch.mm(p, self.w, out=self.hidden[part])
        if p.dtype == self.weight.dtype:
            self.weight.addmm_(p.t(), self.h[part])
        else:
            self.weight += p.t() @ self.h[part]


def _logits(h: Tensor, w: Tensor, cap: float | None) -> Tensor:
    logits = _accurate(h @ w.t())
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else _accurate(like.new_zeros(0))
