"""What the schema says of a setting beside its type: how it is read as typed, and what holds between two starts."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

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

T = TypeVar("T")


class Mark(Enum):
    """What else there is to say of a setting."""

    MAY_CHANGE = "it may differ between two starts of a run"


# Who computes and how it is shown, when something is measured, and a later end. Anything else would make a run that no
# single configuration describes. Of a group it holds for all in it.
MayChange = Annotated[T, Mark.MAY_CHANGE]


@dataclass(frozen=True)
class Before:
    """The value by which a version behaved that had no such setting."""

    value: Any


def hint_of(schema: type, key: str) -> Any:
    """The type of a setting by its dotted key, with its annotations; None where there is none."""
    return next(reversed(hints_to(schema, key)))


def hints_to(schema: type, key: str) -> list[Any]:
    """The types of the groups that lead to a setting, and its own; the last is None where there is no such setting."""
    found: list[Any] = [schema]
    for part in key.split("."):
        of_node = bare(found[-1])
        if dataclasses.is_dataclass(of_node):
            found.append(hints(of_node).get(part))
        elif typing.get_origin(of_node) is dict:
            found.append(typing.get_args(of_node)[1])
        else:
            return [*found, None]
    return found


def marks_of(hint: Any) -> tuple[Any, ...]:
    """What is said of a type beside it."""
    return hint.__metadata__ if typing.get_origin(hint) is Annotated else ()


def may_change(schema: type, key: str) -> bool:
    """Whether a setting may differ between two starts of a run."""
    return any(Mark.MAY_CHANGE in marks_of(hint) for hint in hints_to(schema, key))


def kind_of(hint: Any) -> Kind | None:
    """How a value of this type is read; None: by Hydra's grammar."""
    parts = (
        [hint.__origin__] if typing.get_origin(hint) is Annotated else typing.get_args(hint) if _is_union(hint) else []
    )
    found = [*(mark for mark in marks_of(hint) if isinstance(mark, Kind)), *map(kind_of, parts)]
    return next((kind for kind in found if kind is not None), None)


@functools.cache
def hints(schema: type) -> dict[str, Any]:
    """The types of a dataclass's fields, with their annotations."""
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
