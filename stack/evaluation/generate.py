"""Decoding with a cache of keys and values: many prompts in a batch, or one answer as it comes.

The next id is the likeliest one, or drawn from the likeliest ones by temperature, top-k and top-p in this order, as in
``transformers``. Every prompt draws from a stream of numbers of its own, made from (seed, its number), so its answer
does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stack.core.errors import UserError
from stack.model.decoder import Cache, Decoder
from stack.text.tokenizer import Tokenizer

BROKEN = "\ufffd"  # stands for bytes that are no character
SHRINK = 3 / 4  # finished rows leave the batch once so few are alive: leaving copies the cache, so not at every step


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen."""

    temperature: float = 0.0  # 0: the likeliest id, whatever the others say
    top_k: int = 0  # only among so many likeliest ids; 0: all
    top_p: float = 1.0  # only among the likeliest ids that are needed to reach this mass; the first always stays
    seed: int = 0


GREEDY = Sampling()


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    stops: Sequence[int],
    banned: Sequence[int],
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    """Continues every prompt by up to ``tokens`` ids.

    Args:
        model: the decoder; its parameters' device is used.
        prompts: ids, each with its ``<|endoftext|>`` in front; lengths may differ.
        tokens: the most that is added; less where prompt and answer would leave the model's context.
        stops: an id of these ends its answer and is part of it.
        banned: ids that are never chosen (padding and reserved ones), but a stop always may be: there are models
            whose padding is their end.
        sampling: how an id is chosen.

    Returns:
        The added ids of each prompt.

    Raises:
        UserError: a prompt is empty or leaves no room in the context, or the model's logits are not finite.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for step in _steps(model, prompts, tokens, stops, banned, sampling):
        for row, token in step:
            answers[row].append(token)
    return answers


def stream(
    model: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], *, tokens: int, sampling: Sampling = GREEDY
) -> Iterator[str]:
    """The text of one answer as it comes, without the stop; see :func:`generate` and :func:`pieces`."""
    rows = model.table.num_rows  # a table that is not ours may have more than the vocabulary has tokens
    banned = (*tokenizer.unsampled, *range(tokenizer.vocab_size, rows))
    steps = _steps(model, [prompt], tokens, tokenizer.stops, banned, sampling)
    return pieces(tokenizer, (token for ((_, token),) in steps if token not in tokenizer.stops))


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ids, piece by piece and never half a character; together they are ``tokenizer.decode(ids)``."""
    pending: list[int] = []
    shown = 0  # characters of them
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending)
        whole = len(text) - text.endswith(BROKEN)  # only the last can be the beginning of a character
        if whole > shown:
            yield text[shown:whole]
        shown = whole
        if whole == len(text):
            pending, shown = [], 0
    if pending:
        yield tokenizer.decode(pending)[shown:]


@torch.no_grad()
def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    stops: Sequence[int],
    banned: Sequence[int],
    sampling: Sampling,
) -> Iterator[list[tuple[int, int]]]:
    """Of each step the numbers of the prompts that are not finished, each with the id that it gets."""
    context = model.config.context
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise UserError(f"prompt {number} has {len(prompt)} tokens; the model takes 1 to {context - 1}")
    if not prompts or tokens == 0:
        return
    device = model.table.device
    ends, forbidden = (
        torch.tensor(list(ids), dtype=torch.int64, device=device) for ids in (stops, {*banned} - {*stops})
    )
    draws = _draws(sampling.seed, len(prompts), tokens) if sampling.temperature > 0 else None
    rows = torch.arange(len(prompts), device=device)  # of each row of the cache, the number of its prompt
    where = torch.tensor([len(prompt) for prompt in prompts], device=device)  # the position that its next id takes
    cache, last = _prefill(model, prompts, where, min(context, int(where.max()) + tokens))
    alive = torch.ones_like(rows, dtype=torch.bool)
    for step in range(tokens):
        logits = model.table.logits(last)
        logits[:, forbidden] = -torch.inf
        chosen = _likeliest(logits) if draws is None else _drawn(logits, draws[rows.cpu(), step], sampling)
        yield list(zip(rows[alive].tolist(), chosen[alive].tolist(), strict=True))
        alive &= ~torch.isin(chosen, ends) & (where + 1 < context)
        count = int(alive.sum())
        if count == 0 or step == tokens - 1:
            return
        if count <= SHRINK * len(rows):
            rows, where, chosen = rows[alive], where[alive], chosen[alive]
            cache = Cache([x[alive] for x in cache.keys], [x[alive] for x in cache.values])
            alive = alive[alive]
        last = _extend(model, chosen[:, None], where.clamp(max=context - 1)[:, None], cache)[:, 0]
        where = where + 1


def _prefill(model: Decoder, prompts: Sequence[Sequence[int]], lengths: Tensor, room: int) -> tuple[Cache, Tensor]:
    """A cache of ``room`` positions with the prompts in it, and the hidden state ``[B, d]`` at the end of each.

    Prompts are padded on the right: what padding writes into the cache lies behind a row's own positions, where no
    query of that row looks before an answer's id has taken its place.
    """
    device = lengths.device
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
    cache = model.new_cache(len(prompts), room, _cache_dtype(device))
    hidden = _extend(model, ids, positions, cache)
    return cache, hidden[torch.arange(len(prompts), device=device), lengths - 1]


def _extend(model: Decoder, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """:meth:`Decoder.extend` over the part of the cache that is in use; each position sees itself and all before it."""
    used = int(positions.max()) + 1
    view = Cache([x[:, :used] for x in cache.keys], [x[:, :used] for x in cache.values])
    mask = torch.arange(used, device=positions.device) <= positions[..., None]
    return model.extend(ids, positions, view, mask[:, None])


def _likeliest(logits: Tensor) -> Tensor:
    """``[B, rows]`` → ``[B]`` ids."""
    highest, ids = logits.max(-1)
    _check(highest)
    return ids


def _drawn(logits: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    """``[B, rows]`` logits and ``[B]`` float64 numbers of [0, 1) → ``[B]`` ids.

    Chosen on the CPU in float64, so that one seed gives one text on every device.
    """
    chances, ids = candidates(logits.double().cpu(), sampling)
    mass = chances.cumsum(-1)
    # The first whose mass exceeds the draw: one without a chance adds nothing, so it is never that one.
    place = torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)
    return ids.gather(-1, place)[:, 0].to(logits.device)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The ids that may be drawn.

    Args:
        logits: ``[B, rows]`` float64; -inf at an id that may not.
        sampling: with a temperature above 0.

    Returns:
        Chances ``[B, n]`` float64, which need not sum to 1 and are 0 at ids that may not be drawn, and ids ``[B, n]``.
    """
    highest = logits.amax(-1, keepdim=True)
    _check(highest)
    scores = (logits - highest) / sampling.temperature  # of the difference, so that no temperature overflows the first
    if sampling.top_k > 0 or sampling.top_p < 1:  # the likeliest first
        scores, ids = scores.topk(min(sampling.top_k or scores.shape[-1], scores.shape[-1]))
    else:
        ids = torch.arange(scores.shape[-1]).expand(scores.shape)
    chances = torch.softmax(scores, -1)
    if sampling.top_p < 1:
        likelier = chances.cumsum(-1) - chances  # the mass of those in front
        chances = torch.where(likelier < sampling.top_p, chances, 0.0)
    return chances, ids


def _check(highest: Tensor) -> None:
    """:class:`UserError` where a row's highest logit is not finite: NaN anywhere in a row is its maximum."""
    if not bool(torch.isfinite(highest).all()):
        raise UserError("the model's logits are not finite, so no next token can be chosen; take another checkpoint")


def _draws(seed: int, count: int, tokens: int) -> Tensor:
    """``[count, tokens]`` float64 numbers of [0, 1); a row depends on seed and its number, a column on nothing more.

    They have 24 bits: times a total in float64 they stay below it.
    """
    rows = []
    for row in range(count):
        generator = torch.Generator().manual_seed((seed + row * 0x9E3779B97F4A7C15) % 2**63)
        rows.append(torch.rand(tokens, generator=generator))
    return torch.stack(rows).double()


def _cache_dtype(device: torch.device) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
