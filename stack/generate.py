"""Batched decoding with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stack.config import UserError
from stack.model.transformer import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    stops: Sequence[int],
    banned: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continues every prompt by up to ``tokens`` ids.

    Args:
        model: the decoder; its parameters' device is used.
        prompts: ids, each with its ``<|endoftext|>`` in front; lengths may differ.
        tokens: the most that is added; less where prompt and answer would leave the model's context.
        stops: an id of these ends its answer and is part of it.
        banned: ids that are never chosen (padding and reserved ones).
        temperature: 0 takes the likeliest id; else softmax(logits / temperature) is sampled.
        seed: of the sampling, which draws from a generator of its own.

    Returns:
        The added ids of each prompt.

    Raises:
        UserError: a prompt is empty or leaves no room in the context.
    """
    context = model.config.context
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise UserError(f"prompt {number} has {len(prompt)} tokens; the model takes 1 to {context - 1}")
    if not prompts:
        return []
    device = model.table.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    room = min(context, longest + tokens)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    cache = model.new_cache(len(prompts), room, _cache_dtype(device))
    generator = torch.Generator().manual_seed(seed)
    forbidden = torch.tensor(list(banned), dtype=torch.int64, device=device)
    ends = torch.tensor(list(stops), dtype=torch.int64, device=device)

    # Prompts are padded on the right: what padding writes into the cache lies behind a row's own positions, where no
    # query of that row looks before an answer's token has taken its place.
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    hidden = model.extend(ids, positions, cache, _sees(positions, room))
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    answers: list[list[int]] = [[] for _ in prompts]
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(tokens):
        logits = model.table.logits(last)
        logits[:, forbidden] = -torch.inf
        chosen = _choose(logits, temperature, generator)
        for row, (token, finished) in enumerate(zip(chosen.tolist(), done.tolist(), strict=True)):
            if not finished:
                answers[row].append(token)
        where = lengths + step
        done |= torch.isin(chosen, ends) | (where + 1 >= context)
        if bool(done.all()) or step == tokens - 1:
            break
        where = where.clamp(max=room - 1)[:, None]
        last = model.extend(chosen[:, None], where, cache, _sees(where, room))[:, 0]
    return answers


def _sees(positions: Tensor, room: int) -> Tensor:
    """``[B, 1, T, room]``: a position sees itself and all before it."""
    return (torch.arange(room, device=positions.device) <= positions[..., None])[:, None]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """``[B, rows]`` → ``[B]`` ids."""
    if temperature == 0:
        return logits.argmax(-1)
    # Sampled on the CPU, so that one seed gives one text on every device.
    chances = torch.softmax(logits.float().cpu() / temperature, -1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0].to(logits.device)


def _cache_dtype(device: torch.device) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
