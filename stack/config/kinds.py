"""Settings that are taken as they are typed: what the schema says of them, and where it says it."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError


class Kind(Enum):
    """How a value is read that is not left to Hydra's grammar."""

    PATH = "path"
    PATHS = "paths"
    TEXT = "text"  # of a person: every character as it is


def expanded(path: str) -> str:
    """``path`` with ``~`` and ``~user`` as a shell expands them; a name that no user has stays as it is."""
    if not path:
        raise PydanticCustomError("path", "the path is empty; . is the folder that you are in")
    if path[0] != "~":
        return path
    found = os.path.expanduser(path)
    if path.split("/", 1)[0] == "~" and (found == path or not os.environ.get("HOME", "/")):
        raise PydanticCustomError("path", "there is no home directory here for ~; set HOME, or write the whole path")
    return found


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


PathText = Annotated[str, Kind.PATH, AfterValidator(expanded)]  # a file or a folder; also what may be a name instead
Paths = Annotated[tuple[PathText, ...], Kind.PATHS, BeforeValidator(_listed)]  # one is a list of one
Text = Annotated[str, Kind.TEXT]


def hint_of(schema: type, key: str) -> Any:
    """The type of a setting by its dotted key, with its annotations; None where there is none."""
    hint: Any = schema
    for part in key.split("."):
        of_node = bare(hint)
        if dataclasses.is_dataclass(of_node):
            hint = _hints(of_node).get(part)
        elif typing.get_origin(of_node) is dict:
            hint = typing.get_args(of_node)[1]
        else:
            return None
    return hint


def kind_of(hint: Any) -> Kind | None:
    """How a value of this type is read; None: by Hydra's grammar."""
    if typing.get_origin(hint) is Annotated:
        return next((mark for mark in hint.__metadata__ if isinstance(mark, Kind)), None)
    found = [kind_of(part) for part in typing.get_args(hint)] if _is_union(hint) else []
    return next((kind for kind in found if kind is not None), None)


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema, include_extras=True)


def bare(hint: Any) -> Any:
    """A type without its annotations and without None."""
    if typing.get_origin(hint) is Annotated:
        return bare(hint.__origin__)
    if _is_union(hint):
        return next((bare(part) for part in typing.get_args(hint) if part is not types.NoneType), None)
    return hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
