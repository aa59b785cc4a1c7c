"""A home folder for libraries that ask for one, where this process has none: a bare uid in a container, say."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def home() -> Iterator[None]:
    """Libraries that look for settings or keep a cache below the home folder find one, or none that they need.

    wandb and getpass raise without one, matplotlib complains. What is written there is gone afterwards: nothing that
    is needed lives there.
    """
    missing = [name for name in ("HOME", "MPLCONFIGDIR") if _lacks(name)]
    if not missing:
        yield
        return
    before = {name: os.environ.get(name) for name in missing}
    with tempfile.TemporaryDirectory(prefix="stack-home-", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(missing, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ |= {} if value is None else {name: value}


def _lacks(name: str) -> bool:
    """Whether the home folder is no folder, or matplotlib's would be made in one that cannot be written."""
    try:
        own = Path.home()
    except RuntimeError:  # no HOME, and no entry for the user
        return name == "HOME"
    if name == "HOME":
        return not own.is_dir()
    return own.is_dir() and not os.access(own, os.W_OK) and "MPLCONFIGDIR" not in os.environ
