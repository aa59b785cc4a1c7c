"""How people see a token: its bytes in printable characters, its text in quotes."""

from __future__ import annotations


def readable(data: bytes) -> str:
    """Bytes in printable characters, and never two the same.

    A byte of no UTF-8 shows as ``\\xe2``, a line feed as ``\\n``, a character that cannot be printed as ``\\u200b``, a
    backslash as two.
    """
    text = data.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isascii():
        return character.encode("unicode_escape").decode()
    number = ord(character)  # what \x80 to \xff show are bytes
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def quoted(text: str | None) -> str:
    """The text of a token as tables show it; None is that of a row that has no token."""
    return "(none)" if text is None else f'"{text}"'
