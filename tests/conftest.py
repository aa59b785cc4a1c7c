"""One thread a test process, and no skipped test."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

# Models in tests are small and processes are several: threads that wait for a processor only spin.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """A skipped test proves nothing, so here it fails."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: {report.longrepr}"
    return report
