"""The house: a package knows only those above it, and what is measured of training is handed to it from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STACK = Path(__file__).parents[1] / "stack"
ORDER = (
    *("core", "config", "text", "data", "model", "vocabulary"),
    *("checkpoint", "parallel", "training", "evaluation", "tracking", "observe"),
)
DOORS = {path.stem: path for path in STACK.glob("*.py") if path.stem != "__init__"}
MODULES = sorted(STACK.rglob("*.py"))


def package_of(path: Path) -> str:
    """``training`` of ``stack/training/trainer.py``; of a door its own name."""
    return path.relative_to(STACK).with_suffix("").parts[0]


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """The modules of the program that a file names in an import, wherever it stands, below ``stack``."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.split(".")[0] == "stack"}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            parts = (node.module or "").split(".")
            if parts[0] == "stack":
                found |= {(*parts[1:], alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(STACK)))
def test_a_package_knows_only_those_above_it(path: Path) -> None:
    own = package_of(path)
    known = {parts[0] for parts in imports_of(path) if parts}
    allowed = set(ORDER) | DOORS.keys() if own in DOORS or own == "__init__" else set(ORDER[: ORDER.index(own) + 1])
    assert known <= allowed, f"{path.relative_to(STACK)} imports {', '.join(sorted(known - allowed))}"


def test_no_module_is_in_a_cycle() -> None:
    names = {path.relative_to(STACK).with_suffix("").parts for path in MODULES}
    edges = {
        path.relative_to(STACK).with_suffix("").parts: {
            end for parts in imports_of(path) for end in (parts, parts[:-1]) if end in names
        }
        for path in MODULES
    }
    while leaves := {name for name, known in edges.items() if not known & edges.keys() - {name}}:
        edges = {name: known for name, known in edges.items() if name not in leaves}
    assert not edges, f"in a cycle: {', '.join('.'.join(name) for name in sorted(edges))}"


def longest_function(path: Path) -> int:
    """Lines of the longest function in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return max(
        (n.end_lineno - n.lineno + 1 for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)), default=0
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(STACK)))
def test_a_module_is_read_in_one_sitting_and_a_function_on_one_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert longest_function(path) <= 60


def test_the_trainer_reads_on_one_screen() -> None:
    assert len((STACK / "training/trainer.py").read_text().splitlines()) <= 250
