"""What a person can mend, apart from what is a fault of the program."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """What a person can mend. Entry points print its message alone and exit with 2."""


class EchoError(UserError):
    """A :class:`UserError` that rank 0 tells for all; the rank that raises this one keeps silent."""


class LostError(Exception):
    """Another rank is gone, or failed by a fault of ours. The cause, with its traceback, is told there."""


class BadRow(Exception):
    """A row that holds no text; the message is the reason under which it is counted."""


def some(names: Sequence[str], most: int = 6) -> str:
    """The first ``most`` names for a message, and how many more there are; ``none`` where there is none."""
    return ", ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])]) or "none"
