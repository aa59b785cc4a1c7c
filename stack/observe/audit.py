"""The rows of a model by how undertrained they look, with what is known of them beside.

The indicator alone ranks the rows; occurrences in the training data are shown beside it, and judge it, where they are
known. See :mod:`stack.observe.undertrained` for what the indicators are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from stack.checkpoint.open import Tables, load_tables
from stack.core.errors import UserError
from stack.observe import occurrences, undertrained
from stack.observe.occurrences import Occurrences
from stack.text.display import readable
from stack.text.tokenizer import NO_TEXT, START_OF_TURN, Tokenizer

NAME = "audit.json"  # in a run's folder
SHOWN = 100  # rows that a run lists at its end, and that its page shows
NEAREST = 3  # rows shown beside each one
RESERVED = re.compile(r"reserved|unused", re.IGNORECASE)  # in the texts of control tokens that stand for nothing


def audit(
    checkpoint: str,
    counts: str | None = None,
    unused: Sequence[int] = (),
    top: int = SHOWN,
    runs_dir: str = "runs",
    show: Callable[[str], Any] = print,
    known: bool = True,
) -> dict[str, Any]:
    """The rows of a model by how undertrained they look, as JSON values.

    Args:
        checkpoint: a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama.
        counts: a packed folder of the same vocabulary; otherwise the data that a checkpoint of ours names.
        unused: ids of rows that are known to be unused; otherwise :func:`known_unused`.
        top: rows that are listed.
        runs_dir: where runs stand.
        show: hears what is missing.
        known: whether rows that are known to be unused are listed, too.

    Returns:
        ``listed``: the rows where ``indicator`` is lowest, lowest first; ``unused``: the groups that it was measured
        against; ``occurrences``: how well it finds rows without, None where that is not known; and what the model is.

    Raises:
        UserError: the folder cannot be opened, holds values that are not finite, or gives no row to measure against.
    """
    tables = load_tables(checkpoint, runs_dir, show)
    tokenizer, rows = tables.tokenizer, len(tables.table)
    _check_finite(tables)
    head = tables.table if tables.head is None else tables.head
    groups = _chosen(unused, rows) if unused else known_unused(tokenizer, head)
    if not groups and tables.head is None:
        raise UserError(
            f"{tables.folder}: the vocabulary names no token that is known to be unused, and the head of this model is "
            "its embedding, so there is nothing to measure against; give ids of such tokens: unused='[3,17]'"
        )
    indicators = undertrained.indicators(tables.table, tables.head, list(groups.values()))
    indicator, ranking = next(iter(indicators.items()))
    order, of_groups = ranking.argsort(stable=True), set().union(*groups.values())
    listed = order if known else order[[i not in of_groups for i in order.tolist()]]
    if counts is not None:
        seen = occurrences.in_folder(Path(counts), tokenizer, rows)
    elif tables.manifest is not None:
        seen = occurrences.in_history(tables.folder, tables.manifest, rows, show)
    else:
        seen = None
    return {
        "checkpoint": str(tables.folder),
        "step": None if tables.manifest is None else tables.manifest.step,
        "vocabulary_digest": tokenizer.digest,
        "rows": rows,
        "width": tables.table.shape[1],
        "tied": tables.head is None,
        "indicator": indicator,
        "unused": groups,
        "occurrences": None if seen is None else _judged(seen, order),
        "listed": _listed(tables, indicators, listed[:top], of_groups, seen),
    }


def _check_finite(tables: Tables) -> None:
    for name, rows in (("embedding", tables.table), ("head", tables.head)):
        bad = [] if rows is None else (~rows.isfinite().all(1)).nonzero().flatten().tolist()
        if bad:
            raise UserError(
                f"{tables.folder}: {len(bad):,} rows of the {name} hold values that are not finite, the first is row "
                f"{bad[0]}; take an earlier checkpoint"
            )


# ---------------------------------------------------------------- rows that are known to be unused


def known_unused(tokenizer: Tokenizer, head: Tensor) -> dict[str, list[int]]:
    """Rows that no text can have trained, by the vocabulary alone and never by occurrences, as the paper takes them.

    They are reserved tokens with rows that have no token, and the bytes that no UTF-8 text holds. Where a vocabulary
    has none of these, control tokens without a role are suspected. Rows of zeros have no direction and do not count.

    Returns:
        Ids by what they are, each group with at least one; nothing where there is nothing of all this.
    """
    tokens = range(tokenizer.vocab_size)
    roles = {tokenizer.end_of_text, tokenizer.pad, *tokenizer.stops, tokenizer.control.get(START_OF_TURN)}
    reserved = [i for i in tokens if _category(tokenizer, i) == "reserved"]
    certain = {
        "reserved tokens": [*reserved, *range(tokenizer.vocab_size, len(head))],
        "bytes of no text": [i for i in tokens if _is_no_text(tokenizer, i)],
    }
    suspected = {
        "control tokens without a role": [i for i in tokens if _category(tokenizer, i) == "control" and i not in roles]
    }
    return _with_direction(certain, head) or _with_direction(suspected, head)


def _with_direction(groups: dict[str, list[int]], head: Tensor) -> dict[str, list[int]]:
    left = {kind: [i for i in ids if head[i].any()] for kind, ids in groups.items()}
    return {kind: ids for kind, ids in left.items() if ids}


def _chosen(unused: Sequence[int], rows: int) -> dict[str, list[int]]:
    beyond = [i for i in unused if i >= rows]
    if beyond:
        raise UserError(f"unused={list(unused)}: the model has {rows:,} rows, so there is no row {beyond[0]}")
    return {"given": list(unused)}


def _is_no_text(tokenizer: Tokenizer, index: int) -> bool:
    data = tokenizer.bytes_of(index)
    return len(data) == 1 and data[0] in NO_TEXT


# ---------------------------------------------------------------- rows as people read them


def _judged(seen: Occurrences, order: Tensor) -> dict[str, Any]:
    """How well the order finds the rows with no occurrence, and those that training has met less than once."""

    def first(missing: np.ndarray) -> dict[str, int]:
        return {"rows": int(missing.sum()), "of_the_first": int(missing[order.numpy()][: missing.sum()].sum())}

    return {
        "folders": seen.folders,
        "ids": int(seen.counts.sum()),
        "none": first(seen.counts == 0),
        "met_less_than_once": None if seen.met is None else first(seen.met < 1),
    }


def _listed(
    tables: Tables, indicators: dict[str, Tensor], ids: Tensor, unused: set[int], seen: Occurrences | None
) -> list[dict[str, Any]]:
    tokenizer = tables.tokenizer
    norms = undertrained.norms(tables.table[ids]).tolist()
    near, cosines = (found.tolist() for found in undertrained.nearest(tables.table, ids, NEAREST))
    return [
        {
            "id": i,
            "text": _text(tokenizer, i),
            "category": _category(tokenizer, i),
            "known_unused": i in unused,
            "occurrences": None if seen is None else int(seen.counts[i]),
            "met": None if seen is None or seen.met is None else round(float(seen.met[i]), 2),
            "norm": norms[place],
            **{name: values[i].item() for name, values in indicators.items()},
            "nearest": [
                {"id": other, "text": _text(tokenizer, other), "cosine": cosine}
                for other, cosine in zip(near[place], cosines[place], strict=True)
            ],
        }
        for place, i in enumerate(ids.tolist())
    ]


def _category(tokenizer: Tokenizer, index: int) -> str:
    """``control``, ``reserved``, ``byte``, ``ordinary``, or ``no token`` for a row that has none."""
    if index >= tokenizer.vocab_size:
        return "no token"
    token = tokenizer.id_to_token(index)
    if token in tokenizer.control:
        return "reserved" if index in tokenizer.reserved or RESERVED.search(token) else "control"
    return "byte" if len(tokenizer.bytes_of(index)) == 1 else "ordinary"


def _text(tokenizer: Tokenizer, index: int) -> str | None:
    """The token in printable characters; None for a row that has none."""
    return readable(tokenizer.bytes_of(index)) if index < tokenizer.vocab_size else None
