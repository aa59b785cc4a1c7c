"""Hydra's grammar of overrides: what it reads of an argument, and the quotes that give a text back unchanged."""

from __future__ import annotations

import functools
import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def parsed(argument: str) -> Override | None:
    """An argument as Hydra reads it; None where its grammar refuses it."""
    try:
        return _parser().parse_override(argument)
    except (HydraException, ValueError):
        return None


def text_of(override: Override) -> str:
    """The value of a setting to be read by a person: a text or a list of texts without quotes and brackets."""
    value = override.value()
    if isinstance(value, list) and not any(isinstance(one, list | dict) for one in value):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else override.get_value_element_as_str()


def quoted(text: str) -> str:
    """A text in the quotes that Hydra's grammar and OmegaConf give back unchanged."""
    return in_quotes(re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text))


def in_quotes(text: str) -> str:
    """A text in double quotes; what is ``${…}`` in it stays a reference."""
    return QuotedString(text, Quote.double).with_quotes()


def quoted_text(piece: str) -> str | None:
    """What stands between the quotes of a piece that Hydra takes for a quoted text; None of any other."""
    if len(piece) < 2 or piece[0] not in "\"'" or piece[-1] != piece[0]:
        return None
    override = parsed(f"x={piece}")
    return override._value.text if override is not None and isinstance(override._value, QuotedString) else None


def is_plain(piece: str) -> bool:
    """Whether Hydra takes a piece of a list for the text that it is."""
    override = parsed(f"x={piece}")
    return override is not None and (override._value == piece or isinstance(override._value, QuotedString))
