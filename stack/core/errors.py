"""What a person can mend, apart from what is a fault of the program."""

from __future__ import annotations


class UserError(ValueError):
    """What a person can mend. Entry points print its message alone and exit with 2."""


class EchoError(UserError):
    """A :class:`UserError` of another rank: rank 0 tells it, and nobody else."""


class LostError(Exception):
    """Another rank is gone, or failed by a fault of ours. The cause, with its traceback, is told there."""


class BadRow(Exception):
    """A row that holds no text; the message is the reason under which it is counted."""
