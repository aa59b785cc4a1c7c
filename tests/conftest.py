"""One thread a test process, and no skipped test."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

# Models in tests are small and processes are several: threads that wait for a processor only spin. Set before torch is
# imported, and inherited by what the tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """A skipped test proves nothing, so here it fails."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: {report.longrepr}"
    return report
