"""Breaks the program in one line at a time; the tests of the law that this breaks must notice.

    pytest -m mutation -s

prints the table of mutants. Each is a copy of the checkout with one replacement, in which the named tests run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """One line of the program, what becomes of it, and the tests that must fail."""

    law: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS: list[Mutant] = []


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    for folder in ("stack", "conf", "tests", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1, f"{mutant.file} has {text.count(mutant.before)} places {mutant.before!r}"
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=600,
    )
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if "FAILED " in line]
    print(f"\n| {mutant.law} | {mutant.what} | {mutant.file} | killed by {', '.join(failed) or 'NOTHING'} |")
    assert done.returncode == 1 and failed, (
        f"{mutant.what} was not noticed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
