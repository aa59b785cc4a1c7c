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
        places, parts = _scored(supervised), (flat, ids, supervised)
        hidden, ids, marks = parts if places is None else (x.index_select(0, places) for x in parts)
        losses = _Chunked.apply(hidden, weight, ids, marks, dtype, chunk_tokens, z_loss, softcap, impl == "fused")
        if places is not None:
            losses = losses.new_zeros(len(flat)).index_copy(0, places, losses)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / supervised.sum().clamp(min=1)


def _scored(supervised: Tensor) -> Tensor | None:
    """The positions whose logits are worth computing, int64; None for all of them.

    On a CPU those without a target are left out: in conversations that is half of them. A GPU would have to stop and
    count, so it takes all.
    """
    if supervised.device.type != "cpu" or bool(supervised.all()):
        return None
    return supervised.nonzero()[:, 0]


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
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        upstream = supervised if fused and wanted else None
        losses, *grads = _walk(hidden, weight, ids, upstream, dtype, chunk, z, cap)
        ctx.fused, ctx.settings = fused, (dtype, chunk, z, cap)
        ctx.save_for_backward(*(grads if fused else (hidden, weight, ids, supervised)))
        return losses * supervised

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # under create_graph; once_differentiable would return constants in silence
            raise ValueError("impl='checkpoint' and impl='fused' have no second derivative; use impl='full'")
        if ctx.fused:
            factor = upstream[:1].sum()  # one number for all tokens: the losses are summed
            hidden_grad, weight_grad = (grad * factor for grad in ctx.saved_tensors)
        else:
            hidden, weight, ids, supervised = ctx.saved_tensors
            _, hidden_grad, weight_grad = _walk(hidden, weight, ids, upstream * supervised, *ctx.settings)
        return hidden_grad, weight_grad, *(None,) * 7


def _walk(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    upstream: Tensor | None,
    dtype: torch.dtype,
    chunk: int,
    z: float,
    cap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses ``[N]``, and the gradients of ``(losses * upstream).sum()`` unless ``upstream`` is None."""
    h, w = hidden.to(dtype), weight.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    losses = h.new_empty(len(h), dtype=wide)
    if upstream is not None:
        hidden_grad, weight_grad = torch.empty_like(h), torch.zeros_like(w, dtype=wide)
    # One buffer for the logits of every chunk, overwritten step by step: fresh pages cost a CPU as much as arithmetic.
    room = h.new_empty(min(chunk, len(h)), len(w))
    wide_room = room if dtype == wide else torch.empty_like(room, dtype=wide)
    for start in range(0, len(h), chunk):
        part = slice(start, start + chunk)
        some, target = h[part], ids[part, None]
        product = torch.mm(some, w.t(), out=room[: len(some)])
        x = product if dtype == wide else wide_room[: len(some)].copy_(product)
        if cap is not None:
            slope = 1 - x.div_(cap).tanh_().square()
            x.mul_(cap)
        top = x.amax(-1, keepdim=True)
        own = x.sub_(top).gather(-1, target)
        total = x.exp_().sum(-1, keepdim=True)
        lse = top + total.log()
        losses[part] = (total.log() - own + z * lse.square())[:, 0]
        if upstream is None:
            continue
        u = upstream[part, None].to(wide)
        x.mul_(u * (1 + 2 * z * lse) / total).scatter_add_(-1, target, -u)
        if cap is not None:
            x.mul_(slope)
        torch.mm(product.copy_(x), w, out=hidden_grad[part])
        if dtype == wide:
            weight_grad.addmm_(product.t(), some)
        else:
            weight_grad += product.t() @ some
    if upstream is None:
        return losses, None, None
    return losses, hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype)
