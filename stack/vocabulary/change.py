"""Growth of a vocabulary: tokens, rows of the table, moments, and how far the model's answers move.

Append-only. A token that is there is left alone; a missing one takes a reserved token (renamed, its row initialized
anew) and then a new id. Old rows and their moments stay bit-equal; each initialized row is the mean of the live old
rows. For linear logits the mean's logit is the mean of the live logits, so by Jensen it adds at most Z/V to the
partition function Z of V live rows, and M such rows give ``KL(old || new) <= log(1 + M/V)`` at every position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from stack.core.errors import UserError
from stack.core.files import create_folder, read_json, sha256, short_digest, write_json
from stack.model.attention import Segments
from stack.model.decoder import Decoder
from stack.model.embedding import row_parameters_of
from stack.text import tokenizer
from stack.text.bpe import hugging_face_settings
from stack.text.tokenizer import MULTIPLE, RESERVED, RESERVED_TEXT, Tokenizer

FORMAT = 1  # raise it when the same base and tokens are to give another vocabulary
INITIALIZER = "mean of the live old rows"
POSITIONS = 64  # whose logits exist at one time while KL is measured


@dataclass(frozen=True)
class Growth:
    """What becomes of every row. Row i of the new table is row i of the old one, or it is initialized."""

    old_vocabulary: str  # digests
    new_vocabulary: str
    old_rows: int
    new_rows: int
    renamed: tuple[tuple[int, str, str], ...]  # (id, old text, new text): reserved tokens that were taken
    added: tuple[tuple[int, str], ...]  # (id, text): tokens that were not there, reserved ones of the padding too
    live: tuple[int, ...]  # old rows whose token means something: those that are averaged
    initialized: tuple[int, ...]  # rows that are renamed, taken by a new token, or did not exist

    @property
    def unchanged(self) -> bool:
        """True where the base's vocabulary and table are left alone."""
        return not self.renamed and not self.added

    @property
    def bound(self) -> float:
        """``log(1 + M/V)``, which KL does not exceed where logits are linear."""
        return math.log1p(len(self.initialized) / len(self.live))

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values; ranges of rows are ``[first, last]``, both inside."""
        kept = sorted(set(range(self.old_rows)) - set(self.initialized))
        return {
            "old_vocabulary": self.old_vocabulary,
            "new_vocabulary": self.new_vocabulary,
            "old_rows": self.old_rows,
            "new_rows": self.new_rows,
            "renamed": [list(entry) for entry in self.renamed],
            "added": [list(entry) for entry in self.added],
            "kept": [{"old": part, "new": part} for part in _ranges(kept)],
            "initialized": [{"rows": part, "initializer": INITIALIZER} for part in _ranges(self.initialized)],
            "live": _ranges(self.live),
            "counts": {"kept": len(kept), "initialized": len(self.initialized), "live": len(self.live)},
            "bound": self.bound,
        }

    def summary(self) -> str:
        """One line for people."""
        if self.unchanged:
            return f"vocabulary: all chat tokens are there already; {self.old_rows:,} rows are left as they are"
        texts = [text for _, _, text in self.renamed] + [t for _, t in self.added if not RESERVED_TEXT.fullmatch(t)]
        how = f"{len(texts)} tokens, {len(self.renamed)} of them in reserved rows" if texts else "no token missing"
        return f"vocabulary: {self.old_rows:,} → {self.new_rows:,} rows ({how}); {len(self.initialized)} initialized"


def _ranges(ids: Iterable[int]) -> list[list[int]]:
    """``[0, 1, 2, 5]`` → ``[[0, 2], [5, 5]]``."""
    runs = (list(run) for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


# ---------------------------------------------------------------- tokens


def grow_tokenizer(
    words: Tokenizer, num_rows: int, tokens: Sequence[str], template: str, root: Path
) -> tuple[Tokenizer, Growth]:
    """The tokenizer with ``tokens`` and a chat template, and what its growth means for the table.

    What ended an answer of the base still does.
    It stands in ``root/tokenizers/chat-<8 hex>``, whole or not at all, and is reused where base, rows, tokens and
    template are the same. As many tokens as rows: a multiple of 64, and never fewer than ``num_rows``.

    Args:
        words: of the base.
        num_rows: of the base's table; those beyond its tokens are taken as reserved ones are.
        tokens: control tokens that are to be there, in order.
        template: Jinja, saved as ``chat_template``.
        root: the folder of made data.

    Raises:
        UserError: a token cannot be a control token.
    """
    growth = _plan(words, num_rows, tokens)
    inputs = {
        "format": FORMAT,
        "vocabulary_digest": words.digest,
        "tokenizer_json": sha256(words.folder / "tokenizer.json"),  # merges and pattern, which the digest does not know
        "num_rows": num_rows,
        "tokens": list(tokens),
        "template": template,
    }
    kept = [index for text, index in words.control.items() if RESERVED_TEXT.fullmatch(text) and index in words.stops]
    inputs |= {"kept": kept} if kept else {}  # ends with the text of a reserved token, which the plan passes over
    folder = root / "tokenizers" / f"chat-{short_digest(inputs)}"
    if not (folder / "manifest.json").is_file():
        create_folder(folder, lambda beside: _make(beside, words, growth, inputs))
    grown = tokenizer.load(folder).ending(words.stops)
    assert grown.vocab_size == growth.new_rows and grown.vocab_size % MULTIPLE == 0 and growth.new_rows >= num_rows
    return grown, replace(growth, new_vocabulary=grown.digest)


def _plan(words: Tokenizer, num_rows: int, tokens: Sequence[str]) -> Growth:
    """Which id each missing token takes, and what fills the table up."""
    assert num_rows >= words.vocab_size, "a token without a row"
    _check_tokens(words, tokens)
    names = {index: text for text, index in words.control.items()}
    missing = [text for text in tokens if text not in words.control]
    renamed = [(index, names[index], text) for index, text in zip(words.reserved, missing, strict=False)]
    added = list(enumerate(missing[len(renamed) :], words.vocab_size))
    taken = {index for index, _ in added}
    new_rows = -(-max(num_rows, words.vocab_size + len(added)) // MULTIPLE) * MULTIPLE
    numbers = [int(found[1]) for found in map(RESERVED_TEXT.fullmatch, words.control) if found]
    free, first = words.vocab_size + len(added), max(numbers, default=-1) + 1
    added += [(index, RESERVED.format(first + i)) for i, index in enumerate(range(free, new_rows))]
    dead = set(words.reserved)
    initialized = {index for index, _, _ in renamed} | taken | set(range(num_rows, new_rows))
    return Growth(
        old_vocabulary=words.digest,
        new_vocabulary="",  # known when it is made
        old_rows=num_rows,
        new_rows=new_rows,
        renamed=tuple(renamed),
        added=tuple(added),
        live=tuple(index for index in range(words.vocab_size) if index not in dead),
        initialized=tuple(sorted(initialized)),
    )


def _check_tokens(words: Tokenizer, tokens: Sequence[str]) -> None:
    """UserError unless each can be a control token."""
    for text in tokens:
        reason = ""
        if not text or text != text.strip():
            reason = "is empty or has white space at an end"
        elif tokens.count(text) > 1:
            reason = "is named twice"
        elif RESERVED_TEXT.fullmatch(text):
            reason = "is the text of a reserved token, which is never sampled"
        elif text not in words.control and words.token_to_id(text) is not None:
            reason = f"is a plain token of {words.folder}, so text could spell it"
        if reason:
            raise UserError(f"sft.tokens: {text!r} {reason}; give another text")


def _make(folder: Path, words: Tokenizer, growth: Growth, inputs: dict[str, Any]) -> None:
    """Write the Hugging Face folder of a grown vocabulary."""
    folder.mkdir()
    content = read_json(words.folder / "tokenizer.json")
    texts = {index: new for index, _, new in growth.renamed} | dict(growth.added)
    old = {index: text for index, text, _ in growth.renamed}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    entries = [entry for entry in content["added_tokens"] if entry["id"] not in old]
    entries += [{"id": index, "content": text, **plain} for index, text in texts.items()]
    content["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])
    vocabulary = content["model"]["vocab"]  # some programs list added tokens here as well
    content["model"]["vocab"] = {texts[i] if i in old else token: i for token, i in vocabulary.items()}
    # The template writes the bos. A post-processor that adds it as well would put a second one in front of every
    # rendered text that is encoded by default, and there is none that looks at the text first.
    content["truncation"] = content["padding"] = content["post_processor"] = None
    names = {index: text for text, index in words.control.items()} | texts
    bos = names[words.end_of_text]
    tokenizers.Tokenizer.from_str(json.dumps(content)).save(str(folder / "tokenizer.json"))
    chat = {tokenizer.START_OF_TURN, tokenizer.END_OF_TURN} <= set(names.values())
    settings = {
        "bos_token": bos,
        "eos_token": tokenizer.END_OF_TURN if chat else bos,
        "pad_token": names.get(words.pad) or words.id_to_token(words.pad),
        "chat_template": inputs["template"],
    }
    write_json(folder / "tokenizer_config.json", hugging_face_settings() | settings)
    digest = tokenizer.load(folder).digest
    facts = replace(growth, new_vocabulary=digest).facts()
    write_json(folder / "manifest.json", {"inputs": inputs, "vocabulary_digest": digest, "growth": facts})


# ---------------------------------------------------------------- rows


def migrate(
    growth: Growth, weights: dict[str, Tensor], moments: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments of the grown table; everything that has no rows of it is passed on as it is.

    Args:
        growth: of this base.
        weights: by parameter name, the table once, as :class:`stack.checkpoint.open.Base` has them.
        moments: ``KIND/PARAMETER``; AdamW's step stays, so that the bias of young moments is not corrected twice.

    Returns:
        New dictionaries. Old rows are bit-equal; initialized ones are the mean (computed in float64) of the live old
        rows in the weights, and zero in the moments.
    """
    grown, moved = dict(weights), dict(moments)
    for rows in row_parameters_of(weights):
        mean = rows.tensor[list(growth.live)].double().mean(0).to(rows.tensor.dtype)
        grown[rows.name] = _grow(growth, rows.tensor, mean)
        zero = torch.zeros((), dtype=rows.tensor.dtype)
        for key, value in moments.items():
            if key.partition("/")[2] == rows.name and value.dim() > 0:
                moved[key] = _grow(growth, value, zero)
    return grown, moved


def _grow(growth: Growth, old: Tensor, value: Tensor) -> Tensor:
    """``[old_rows, d]`` → ``[new_rows, d]`` with ``value`` in the initialized rows."""
    assert old.shape[0] == growth.old_rows, f"{old.shape[0]} rows, {growth.old_rows} are to grow"
    new = old.new_empty(growth.new_rows, *old.shape[1:])
    new[: growth.old_rows] = old
    new[list(growth.initialized)] = value.to(old.dtype)
    return new


# ---------------------------------------------------------------- what it does to the answers


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
    device = old.table.weight.device
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
