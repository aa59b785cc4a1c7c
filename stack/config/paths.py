"""Paths and lists of paths as people type them, for Hydra.

How a path is read:

* ``~`` and ``~user`` in front are the home directory, in files of settings too (:data:`stack.config.kinds.PathText`).
* What exists as it is typed is that file, whatever its characters. Otherwise quotes around it fall away, ``\\,`` is a
  comma, ``null`` is no path, and ``${…}`` is the value of another setting.
* A list is ``[a.txt, b.txt]``, ``a.txt,b.txt`` or one path. A comma parts two paths, unless more of what is typed
  exists with the comma inside a path: ``a,b.txt`` is one file where ``a,b.txt`` exists and ``a`` or ``b.txt`` does not.
  Quotes decide it: ``["a,b.txt"]``.
* Under ``-m`` a comma in a path is no sweep; ``choice(…)`` is: ``'base=choice(runs/a,runs/b)'``.
"""

from __future__ import annotations

import glob
import os
import re

from stack.config.grammar import in_quotes, quoted, quoted_text
from stack.config.kinds import Kind

LONGEST = 4096  # characters of a path, of Linux


def path_for_hydra(kind: Kind, value: str) -> str:
    """A path or a list of paths in the quotes that Hydra's grammar asks for."""
    if re.fullmatch("null", value, re.IGNORECASE) and not exists(value):
        return "null"
    if kind is Kind.PATH or (_REFERS.search(value) and not value.startswith("[") and not exists(value)):
        return _for_hydra(value)
    if exists(value):
        return f"[{quoted(value)}]"
    inside = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not value:
        return quoted(value)
    return f"[{','.join(_for_hydra(path) for path in paths_of(inside))}]"


def _for_hydra(path: str) -> str:
    """One path as typed, in Hydra's quotes."""
    if exists(path):
        return quoted(path)
    if (text := quoted_text(path)) is not None:
        return in_quotes(text)  # with ${…} and \\${ as they are
    text = _ESCAPE.sub(r"\1", path)
    return in_quotes(text) if _REFERS.search(text) else quoted(text)


_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, \t])")  # of Hydra's grammar
_REFERS = re.compile(r"\$\{.+\}", re.DOTALL)  # to another setting


def exists(path: str) -> bool:
    """Whether a path is there as it is typed, but for ``~``."""
    return os.path.lexists(os.path.expanduser(path))


def _matches(pattern: str) -> bool:
    """Whether a glob pattern stands for a file."""
    full = os.path.expanduser(pattern)
    try:
        return glob.has_magic(full) and any(glob.iglob(full, recursive=True))
    except re.error:
        return False


def paths_of(text: str) -> list[str]:
    """The paths that ``text``, without its brackets, is a list of; see the module for what a comma means.

    The fewest paths that do not exist, and of these readings the one with the most paths.
    """
    pieces = pieces_of(text)
    spans = _spans(text, pieces)
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (len(pieces) + 1)  # missing, minus the paths, the end of the first
    for first in reversed(range(len(pieces))):
        readings = []
        for last in range(first, len(pieces)):
            whole = text[spans[first][0] : spans[last][1]].strip()
            if len(whole) > LONGEST:
                break
            there = _is_there(whole) or (last == first and _says_so(whole))
            if there or last == first:
                missing, others, _ = best[last + 1]
                readings.append((missing + (not there), others - 1, last + 1))
            if there and best[last + 1][0] == 0:
                break  # nothing is better than this
        best[first] = min(readings)
    found, at = [], 0
    while at < len(pieces):
        end = best[at][2]
        found.append(text[spans[at][0] : spans[end - 1][1]].strip())
        at = end
    return [path for path in found if path]


def _is_there(piece: str) -> bool:
    plain = _ESCAPE.sub(r"\1", piece)
    return exists(piece) or exists(plain) or _matches(piece) or _matches(plain)


def _says_so(piece: str) -> bool:
    """Whether a piece says itself that it is one path."""
    return quoted_text(piece) is not None or _REFERS.search(piece) is not None


def pieces_of(text: str, lists: bool = False) -> list[str]:
    """``text`` parted at the commas outside of quotes, and with ``lists`` outside of brackets that begin a piece."""
    pieces = []
    while text:
        match = _IN_QUOTES.match(text) or (_IN_BRACKETS.match(text) if lists else None) or _UP_TO_COMMA.match(text)
        assert match is not None, "the last pattern takes anything"
        pieces.append(match[0])
        text = text[match.end() + 1 :]
        if match.end() + 1 == len(match.string):
            pieces.append("")  # behind a last comma
    return pieces


def _spans(text: str, pieces: list[str]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for piece in pieces:
        spans.append((at, at + len(piece)))
        at += len(piece) + 1
    return spans


_UP_TO_COMMA = re.compile(r"(?:\$\{[^}]*\}|[^,])*", re.DOTALL)
_IN_BRACKETS = re.compile(r"\s*\[[^\]]*\]\s*(?=,|$)", re.DOTALL)
_IN_QUOTES = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*(?=,|$)""", re.DOTALL)
