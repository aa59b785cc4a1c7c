"""LAWS.md names tests that exist and run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LAWS = (TESTS / "LAWS.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", LAWS)))
NOT_RUN = {"slow", "mutation", "browser", "skip", "skipif", "xfail"}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists_and_runs_by_default(file: str, name: str) -> None:
    path = TESTS.parent / file
    assert path.exists(), f"LAWS.md names {file}, which is not there"
    found = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1, f"LAWS.md names {file}::{name}, which is not there"
    marks = {
        node.attr
        for decorator in found[0].decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Attribute)
    }
    assert not marks & NOT_RUN, f"{file}::{name} does not run by default: {marks & NOT_RUN}"
    assert "pytestmark" not in path.read_text(), f"{file} marks all of its tests"


@pytest.mark.parametrize("law", [str(number) for number in range(1, 11)])
def test_every_law_of_these_parts_has_a_test(law: str) -> None:
    rows = [line for line in LAWS.splitlines() if line.startswith(f"| {law} |")]
    assert rows and all("::" in row for row in rows), f"law {law} has no test in LAWS.md"


CASES = (
    "accumulation", "ranks", "nothing to learn", "chunking", "sum over chunks", "validation", "last window",
    "packed neighbours", "long items (documents)", "short split", "big ids", "alphabet", "control text (documents)",
    "small vocabularies", "names", "tied file", "contradicting file", "cut checkpoint", "disk full",
    "ranks and folders", "long items (conversations)", "control text (messages)", "stop", "mask border",
    "odd conversations", "padded table", "optimizer built before growth", "histogram", "no key",
)  # fmt: skip


IN_USE = (
    "a cut compressed file",
    "a file of many names",
    "a file that changes",
    "columns that mean something",
    "the template in other programs",
    "the umask",
    "one text file, a small corpus",
    "paths as typed",
    "conversations of others",
    "ends of a foreign base",
    "padding and serving",
    "a terminal that has gone",
    "a host without a name",
    "no locks, no syncing",
    "no home",
    "the environment of wandb",
    "sweeps",
    "an argument without a key",
    "a stretch without end",
    "raw text that is gone",
    "a run of an older version",
    "links and relative paths",
    "what kills leave behind",
    "ranks without a shared folder",
    "light workers",
)  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *IN_USE])
def test_every_case_of_these_parts_has_a_test(case: str) -> None:
    rows = [line for line in LAWS.splitlines() if line.startswith(f"| {case} |")]
    assert len(rows) == 1 and "::" in rows[0], f"the case {case!r} has no test in LAWS.md"
