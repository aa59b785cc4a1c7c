"""``python -m stack.audit``: lists the undertrained tokens of a checkpoint, ours or other people's, tied or not.

The indicator alone ranks the rows; occurrences in the training data are shown beside it, and judge it, where they are
known. See :mod:`stack.diagnostics.undertrained` for what the indicators are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from stack import occurrences
from stack.base import Tables, load_tables
from stack.config import Audit, UserError, entry
from stack.diagnostics import undertrained
from stack.occurrences import Occurrences
from stack.tokenizer import NO_TEXT, START_OF_TURN, Tokenizer

NEAREST = 3  # rows shown beside each one
TOKEN = 20  # columns of a terminal for a token
RESERVED = re.compile(r"reserved|unused", re.IGNORECASE)  # in the texts of control tokens that stand for nothing
TITLES = {
    undertrained.NORM: "L2 norm of the input embedding",
    undertrained.DISTANCE: "cosine distance to the mean of known unused rows of the head",
}


def run(config: Audit) -> int:
    """The whole of ``stack.audit``; returns the exit code."""
    found = audit(config.checkpoint, config.counts, config.unused, config.top, config.runs_dir, show=_note)
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    sys.stdout.reconfigure(encoding="utf-8")
    if config.json == "-":
        sys.stdout.write(text)
        return 0
    if config.json is not None:
        try:
            Path(config.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"json={config.json}: cannot be written ({error.strerror}); give another path") from error
    _print(found)
    return 0


def _note(line: str) -> None:
    """Says something that is no part of the result."""
    print(line, file=sys.stderr, flush=True)


def audit(
    checkpoint: str,
    counts: str | None = None,
    unused: Sequence[int] = (),
    top: int = 50,
    runs_dir: str = "runs",
    show: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """The rows of a model by how undertrained they look, as JSON values.

    Args:
        checkpoint: a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama.
        counts: a packed folder of the same vocabulary; otherwise the data that a checkpoint of ours names.
        unused: ids of rows that are known to be unused; otherwise :func:`known_unused`.
        top: rows that are listed.
        runs_dir: where runs stand.
        show: hears what is missing.

    Returns:
        ``listed``: the rows where ``indicator`` is lowest, lowest first; ``unused``: the groups that it was measured
        against; ``occurrences``: how well it finds rows without, None where that is not known; and what the model is.

    Raises:
        UserError: the folder cannot be opened, holds values that are not finite, or gives no row to measure against.
    """
    tables = load_tables(checkpoint, runs_dir, show)
    words, rows = tables.tokenizer, len(tables.table)
    _check_finite(tables)
    head = tables.table if tables.head is None else tables.head
    groups = _chosen(unused, rows) if unused else known_unused(words, head)
    if not groups and tables.head is None:
        raise UserError(
            f"{tables.folder}: the vocabulary names no token that is known to be unused, and the head of this model is "
            "its embedding, so there is nothing to measure against; give ids of such tokens: unused='[3,17]'"
        )
    indicators = undertrained.indicators(tables.table, tables.head, list(groups.values()))
    indicator, ranking = next(iter(indicators.items()))
    order = ranking.argsort(stable=True)
    if counts is not None:
        seen = occurrences.in_folder(Path(counts), words, rows)
    elif tables.manifest is not None:
        seen = occurrences.in_history(tables.folder, tables.manifest, rows, show)
    else:
        seen = None
    return {
        "checkpoint": str(tables.folder),
        "step": None if tables.manifest is None else tables.manifest.step,
        "vocabulary_digest": words.digest,
        "rows": rows,
        "width": tables.table.shape[1],
        "tied": tables.head is None,
        "indicator": indicator,
        "unused": groups,
        "occurrences": None if seen is None else _judged(seen, order),
        "listed": _listed(tables, indicators, order[:top], set().union(*groups.values()), seen),
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


def known_unused(words: Tokenizer, head: Tensor) -> dict[str, list[int]]:
    """Rows that no text can have trained, by the vocabulary alone and never by occurrences, as the paper takes them.

    They are reserved tokens with rows that have no token, and the bytes that no UTF-8 text holds. Where a vocabulary
    has none of these, control tokens without a role are suspected. Rows of zeros have no direction and do not count.

    Returns:
        Ids by what they are, each group with at least one; nothing where there is nothing of all this.
    """
    tokens = range(words.vocab_size)
    roles = {words.end_of_text, words.pad, *words.stops, words.control.get(START_OF_TURN)}
    reserved = [i for i in tokens if _category(words, i) == "reserved"]
    certain = {
        "reserved tokens": [*reserved, *range(words.vocab_size, len(head))],
        "bytes of no text": [i for i in tokens if _is_no_text(words, i)],
    }
    suspected = {
        "control tokens without a role": [i for i in tokens if _category(words, i) == "control" and i not in roles]
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


def _is_no_text(words: Tokenizer, index: int) -> bool:
    data = words.bytes_of(index)
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
    words = tables.tokenizer
    norms = undertrained.norms(tables.table[ids]).tolist()
    near, cosines = (found.tolist() for found in undertrained.nearest(tables.table, ids, NEAREST))
    return [
        {
            "id": i,
            "text": _text(words, i),
            "category": _category(words, i),
            "known_unused": i in unused,
            "occurrences": None if seen is None else int(seen.counts[i]),
            "met": None if seen is None or seen.met is None else round(float(seen.met[i]), 2),
            "norm": norms[place],
            **{name: values[i].item() for name, values in indicators.items()},
            "nearest": [
                {"id": other, "text": _text(words, other), "cosine": cosine}
                for other, cosine in zip(near[place], cosines[place], strict=True)
            ],
        }
        for place, i in enumerate(ids.tolist())
    ]


def _category(words: Tokenizer, index: int) -> str:
    """``control``, ``reserved``, ``byte``, ``ordinary``, or ``no token`` for a row that has none."""
    if index >= words.vocab_size:
        return "no token"
    token = words.id_to_token(index)
    if token in words.control:
        return "reserved" if index in words.reserved or RESERVED.search(token) else "control"
    return "byte" if len(words.bytes_of(index)) == 1 else "ordinary"


def _text(words: Tokenizer, index: int) -> str | None:
    """The token in printable characters; None for a row that has none."""
    return readable(words.bytes_of(index)) if index < words.vocab_size else None


def readable(data: bytes) -> str:
    """Bytes in printable characters, and never two the same.

    A byte of no UTF-8 shows as ``\\xe2``, a line feed as ``\\n``, a character that cannot be printed as ``\\u200b``, a
    backslash as two.
    """
    text = data.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isascii():
        return character.encode("unicode_escape").decode()
    number = ord(character)  # what \x80 to \xff show are bytes
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _print(found: dict[str, Any]) -> None:
    """The table and its summary, for a terminal of any width, a pipe or a file."""
    console = Console(highlight=False)
    name = found["indicator"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in dict.fromkeys(("id", "occurs", undertrained.NORM, name)):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=TOKEN)
    table.add_column("nearest")  # the only one that may shrink, so the first that does
    for row in found["listed"]:
        near = ", ".join(f"{other['cosine']:.2f} {_quoted(other['text'])}" for other in row["nearest"])
        times = "?" if row["occurrences"] is None else f"{row['occurrences']:,}"
        numbers = [f"{row[key]:.{digits}f}" for key, digits in {undertrained.NORM: 3, name: 4}.items()]
        kind = row["category"] + "*" * row["known_unused"]
        cells = map(Text, (str(row["id"]), times, *numbers, kind, _quoted(row["text"])))
        table.add_row(*cells, Text(near, no_wrap=True, overflow="ellipsis"))
    console.print(table)
    for line in _summary(found):
        console.print(line, markup=False, soft_wrap=True)


def _quoted(text: str | None) -> str:
    return "(none)" if text is None else f'"{text}"'


def _summary(found: dict[str, Any]) -> list[str]:
    seen, tied = found["occurrences"], "tied" if found["tied"] else "untied"
    lines = [
        f"{found['checkpoint']}: {found['rows']:,} rows of {found['width']}, {tied}",
        f"ranked by {found['indicator']}: {TITLES[found['indicator']]}",
        f"* known unused: {', '.join(f'{len(ids):,} {kind}' for kind, ids in found['unused'].items()) or 'none'}",
    ]
    if seen is None:
        return [*lines, "occurrences: not known; counts=FOLDER gives them"]
    what = {"none": "no occurrence", "met_less_than_once": "met less than once so far, on average"}
    judged = [(what[key], seen[key]) for key in what if seen[key] is not None]
    lines.append(f"occurrences: {seen['ids']:,} ids in {', '.join(seen['folders'])}")
    return lines + [
        f"{text}: {value['rows']:,} rows; of the first {value['rows']:,} listed so, {value['of_the_first']:,}"
        for text, value in judged
    ]


main = entry("audit", Audit, run, raw=("checkpoint", "counts", "json"))

if __name__ == "__main__":
    main()
