"""What a person can mend, apart from what is a fault of the program."""

from __future__ import annotations


class UserError(ValueError):
    """What a person can mend. Entry points print its message alone and exit with 2."""


class EchoError(UserError):
    """A :class:`UserError` of rank 0 as another rank raises it: told already."""
