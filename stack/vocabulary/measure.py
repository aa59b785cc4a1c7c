"""What a change of the vocabulary does to the answers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stack.core.errors import UserError
from stack.model.attention import Segments
from stack.model.decoder import Decoder
from stack.vocabulary.change import Growth

POSITIONS = 64  # whose logits exist at one time


@torch.no_grad()
def measure(growth: Growth, old: Decoder, new: Decoder, texts: Iterable[Sequence[int]]) -> dict[str, float]:
    """Run both models on texts: how far the next-token distribution moves, and what the new rows have of it.

    Args:
        growth: that made ``new`` out of ``old``.
        old: the base. Its distribution is over the live rows.
        new: the grown model. Its distribution is over the live and the initialized rows.
        texts: old ids, each with its ``<|endoftext|>`` in front; longer ones than the context are cut.

    Returns:
        ``kl``, the mean over positions of KL(old || new) in nats; ``bound`` of it for linear logits; ``mass``, the mean
        probability of the initialized rows; ``positions``.
    """
    device = old.table.device
    live = torch.tensor(growth.live, device=device)
    both = torch.cat((live, torch.tensor(growth.initialized, dtype=torch.int64, device=device)))
    kl, mass, positions = 0.0, 0.0, 0
    for text in filter(len, texts):
        ids = torch.tensor([list(text)[: old.config.context]], device=device)
        before, after = (_hidden(model, ids).split(POSITIONS) for model in (old, new))
        for a, b in zip(before, after, strict=True):
            p = old.table.logits(a)[:, live].double().log_softmax(-1)
            q = new.table.logits(b)[:, both].double().log_softmax(-1)
            kl += (p.exp() * (p - q[:, : len(live)])).sum().item()
            mass += q[:, len(live) :].exp().sum().item()
            positions += len(a)
    if not positions:
        raise UserError("no text to measure the growth on; give a base and conversations with held-out text")
    return {"kl": kl / positions, "bound": growth.bound, "mass": mass / positions, "positions": positions}


def _hidden(model: Decoder, ids: Tensor) -> Tensor:
    """``[1, T]`` → ``[T, d]``."""
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)[None]
    with model.uncompiled():
        return model.hidden(ids, positions, Segments(((length,),), length, ids.device))[0]
