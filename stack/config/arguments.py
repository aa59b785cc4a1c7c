"""What a person types behind ``python -m stack.DOOR``, and what Hydra gets of it.

Hydra's grammar is made for numbers and short words: ``~``, ``(``, ``=``, ``'`` and most letters outside of ASCII are
errors in it. So the schema says of a setting that it is a path, a list of paths or a text, and such a value is taken as
it is typed: it reaches Hydra in quotes. Everything else is Hydra's to read (lists, sweeps, ``${…}``), and what it
cannot read is told with the quoting that works.

How a path is read:

* ``~`` and ``~user`` in front are the home directory, in files of settings too (:data:`PathText`).
* What exists as it is typed is that file, whatever its characters. Otherwise quotes around it fall away, ``\\,`` is a
  comma, ``null`` is no path, and ``${…}`` is the value of another setting.
* A list is ``[a.txt, b.txt]``, ``a.txt,b.txt`` or one path. A comma parts two paths, unless more of what is typed
  exists with the comma inside a path: ``a,b.txt`` is one file where ``a,b.txt`` exists and ``a`` or ``b.txt`` does not.
  Quotes decide it: ``["a,b.txt"]``.
* Under ``-m`` a comma in a path is no sweep; ``choice(…)`` is: ``'base=choice(runs/a,runs/b)'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import glob
import os
import re
import shlex
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from stack.core.errors import UserError

_HERE = Path(__file__).resolve().parent.parent
# The configurations stand beside the package in a checkout and inside it in a wheel.
CONF = str(next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir()))


LONGEST = 4096  # characters of a path, of Linux


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


# ---------------------------------------------------------------------------------------- what the schema says


def hint_of(schema: type, key: str) -> Any:
    """The type of a setting by its dotted key, with its annotations; None where there is none."""
    hint: Any = schema
    for part in key.split("."):
        of_node = _bare(hint)
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


def _bare(hint: Any) -> Any:
    """A type without its annotations and without None."""
    if typing.get_origin(hint) is Annotated:
        return _bare(hint.__origin__)
    if _is_union(hint):
        return next((_bare(part) for part in typing.get_args(hint) if part is not types.NoneType), None)
    return hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


# ---------------------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Given:
    """A command line that is read."""

    hydra: list[str]  # for Hydra in its place
    several: bool  # -m: one job for each of some values
    swept: tuple[str, ...] = ()  # keys of these
    typed: dict[str, str] = field(default_factory=dict)  # what was typed, by what Hydra gets


@dataclass(frozen=True)
class Door:
    """What there is to say about an entry point: ``stack.NAME``."""

    name: str
    schema: type
    positional: str | None = None  # the setting that an argument without KEY= stands for


def read(arguments: list[str], door: Door) -> Given:
    """The command line as Hydra takes it.

    Raises:
        UserError: arguments that are no settings, or that cannot be read; all of them together.
    """
    flags, options, words = _flags(arguments, door)
    if options.experimental_rerun is not None:
        raise UserError("--experimental-rerun reads a pickle, which this program never does; give the settings instead")
    several = options.multirun or any(word.lower() == "hydra.mode=multirun" for word in words)
    settings = [word for word in words if _is_setting(word, door)]
    others = [word for word in words if not _is_setting(word, door)]
    problems: list[str] = []
    typed: dict[str, str] = {}
    swept = []
    for word in settings:
        try:
            ours = _setting(word, door, several)
        except UserError as error:
            problems.append(str(error))
            continue
        typed[ours] = word
        if (override := parsed(ours)) is not None and override.is_sweep_override():
            swept.append(override.get_key_element().lstrip("+"))
    try:
        typed |= _positional(others, settings, door)
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return Given([*flags, *typed], several, tuple(dict.fromkeys(swept)), typed)


def _flags(arguments: list[str], door: Door) -> tuple[list[str], argparse.Namespace, list[str]]:
    """Hydra's flags, what they say, and the other arguments: both in their order, wherever they stand."""

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists what there is")

    end = arguments.index("--") if "--" in arguments else len(arguments)  # what comes after it is no flag
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]  argparse would print its usage
    options, unknown = parser.parse_known_intermixed_args(arguments[:end])
    if unknown:
        raise UserError("\n".join(_no_flag(flag, door) for flag in unknown))
    flags, words = [], list(options.overrides)
    for argument in arguments[:end]:
        if words and argument == words[0]:
            words.pop(0)
        else:
            flags.append(argument)
    return flags, options, [*options.overrides, *arguments[end + 1 :]]


def _no_flag(flag: str, door: Door) -> str:
    key, equal, value = flag.lstrip("-").partition("=")
    for meant in (key, key.replace("-", "_")):
        if _known(meant, door):
            return f"{flag}: settings have no dashes; write {shlex.quote(meant + '=' + (value if equal else 'VALUE'))}"
    return f"{flag}: there is no such flag; settings are KEY=VALUE without dashes, and --help lists them"


_KEY = re.compile(r"(?:\+{0,2}|~)[A-Za-z_$][\w$-]*(?:[./@:][\w$-]+)*")


def _is_setting(word: str, door: Door) -> bool:
    """``KEY=VALUE``, or ``~KEY``, which takes one away. What has no such key and is a file of that name is a path."""
    head, equal, _ = word.partition("=")
    if not equal:
        return re.fullmatch(r"~[A-Za-z_]\w*(?:\.\w+)*", word) is not None
    if head.startswith("hydra") or _known(head.lstrip("+~"), door):
        return True
    return _KEY.fullmatch(head) is not None and not os.path.lexists(word) and ("/" not in head or not door.positional)


def _known(key: str, door: Door) -> bool:
    return bool(key) and (hint_of(door.schema, key) is not None or _is_group(key))


def _is_group(key: str) -> bool:
    """Whether there is a group of settings of this name; a path, which may lead to a folder, is none."""
    return re.fullmatch(r"\w+", key) is not None and (Path(CONF) / key).is_dir()


def _positional(words: list[str], settings: list[str], door: Door) -> dict[str, str]:
    """The arguments without a key, as the setting that they stand for."""
    if not words:
        return {}
    key = door.positional
    if key is None or any(_known(word.partition("=")[0].strip(), door) for word in words):
        raise UserError("\n".join(_no_setting(word, door) for word in words))
    given = next((word for word in settings if word.startswith(f"{key}=")), None)
    if given is not None:
        raise UserError(f"{key} is given twice: {shlex.join([words[0], given])}; give one of them")
    several = kind_of(hint_of(door.schema, key)) == Kind.PATHS
    if len(words) > 1 and not several:
        raise UserError(
            f"{shlex.join(words)}: stack.{door.name} takes one argument without KEY=, its {key}; "
            "quote a path with blanks in it, and write other settings as KEY=VALUE"
        )
    values = ",".join(quoted(word) for word in words)
    return {f"++{key}=[{values}]" if several else f"++{key}={values}": shlex.join(words) if several else words[0]}


def _no_setting(word: str, door: Door) -> str:
    """What to say of an argument that is no setting, to a door that takes no other."""
    head, equal, value = word.partition("=")
    if not head.strip() or (_known(head.strip(), door) and head != head.strip()):
        meant = f"{head.strip() or 'KEY'}={value.strip() or 'VALUE'}"
        return f"{shlex.quote(word)}: no blanks around the =; write {shlex.quote(meant)}"
    if not equal and _known(word, door):
        return f"{word} has no value; write {word}=VALUE, without blanks around the ="
    says = f"{shlex.quote(word)} is no setting; settings are KEY=VALUE without blanks"
    if not equal and (groups := sorted(path.parent.name for path in Path(CONF).glob(f"*/{glob.escape(word)}.yaml"))):
        return f"{says}: perhaps {' or '.join(f'{group}={word}' for group in groups)}"
    if hint_of(door.schema, "data.files") is not None and os.path.lexists(os.path.expanduser(word)):
        return f"{says}: your own text is {shlex.quote(f'data.files={word}')}"
    return f"{says}, and --help lists them"


# ---------------------------------------------------------------------------------------- one setting


def _setting(word: str, door: Door, several: bool) -> str:
    """``KEY=VALUE`` for Hydra; raises :class:`UserError` where the value cannot be read."""
    head, _, value = word.partition("=")
    key = head.lstrip("+")
    hint = None if head.startswith(("~", "hydra")) else hint_of(door.schema, key)
    kind = kind_of(hint)
    if kind is None:
        return _left_to_hydra(word, hint, several)
    value = value if kind is Kind.TEXT or exists(value) else value.strip()
    if kind is Kind.TEXT:
        ours = quoted(value)
    elif several and (found := re.fullmatch(r"choice\((.*)\)", value, re.DOTALL)) and not exists(value):
        choices = _pieces(found[1], lists=True) if kind is Kind.PATHS else _paths(found[1])
        ours = ",".join(_path_for_hydra(kind, choice) for choice in choices)  # in Hydra's choice() quotes are lost
    else:
        _refuse_unclear(key, kind, value, several)
        ours = _path_for_hydra(kind, value)
    return f"++{key}={ours}"


def _refuse_unclear(key: str, kind: Kind, value: str, several: bool) -> None:
    """A path under ``-m`` with commas that are not said to be its own."""
    if not several or "," not in value or exists(value) or value.startswith("[") or _quoted_text(value) is not None:
        return
    if kind is Kind.PATHS and len(_paths(value)) == 1:
        return
    one = f"[{value}]" if kind is Kind.PATHS else quoted(value)
    raise UserError(
        f"{shlex.quote(f'{key}={value}')} is not clear under -m: {shlex.quote(f'{key}=choice({value})')} is a job for "
        f"each, {shlex.quote(f'{key}={one}')} is one {'list' if kind is Kind.PATHS else 'path'}"
    )


def _path_for_hydra(kind: Kind, value: str) -> str:
    """A path or a list of paths in the quotes that Hydra's grammar asks for."""
    if re.fullmatch("null", value, re.IGNORECASE) and not exists(value):
        return "null"
    if kind is Kind.PATH or (_REFERS.search(value) and not value.startswith("[") and not exists(value)):
        return _for_hydra(value)
    if exists(value):
        return f"[{quoted(value)}]"
    inside = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not value:
        return quoted(value)
    return f"[{','.join(_for_hydra(path) for path in _paths(inside))}]"


def _for_hydra(path: str) -> str:
    """One path as typed, in Hydra's quotes."""
    if exists(path):
        return quoted(path)
    if (text := _quoted_text(path)) is not None:
        return _in_quotes(text)  # with ${…} and \\${ as they are
    text = _ESCAPE.sub(r"\1", path)
    return _in_quotes(text) if _REFERS.search(text) else quoted(text)


_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, \t])")  # of Hydra's grammar
_REFERS = re.compile(r"\$\{.+\}", re.DOTALL)  # to another setting


def exists(path: str) -> bool:
    """Whether a path is there as it is typed, but for ``~``."""
    return os.path.lexists(os.path.expanduser(path))


def _matches(pattern: str) -> bool:
    """Whether a glob pattern stands for a file."""
    full = os.path.expanduser(pattern)
    try:
        return glob.has_magic(full) and any(glob.iglob(full, recursive=True))
    except re.error:
        return False


def _paths(text: str) -> list[str]:
    """The paths that ``text``, without its brackets, is a list of; see the module for what a comma means.

    The fewest paths that do not exist, and of these readings the one with the most paths.
    """
    pieces = _pieces(text)
    spans = _spans(text, pieces)
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (len(pieces) + 1)  # missing, minus the paths, the end of the first
    for first in reversed(range(len(pieces))):
        readings = []
        for last in range(first, len(pieces)):
            whole = text[spans[first][0] : spans[last][1]].strip()
            if len(whole) > LONGEST:
                break
            there = _is_there(whole) or (last == first and _says_so(whole))
            if there or last == first:
                missing, others, _ = best[last + 1]
                readings.append((missing + (not there), others - 1, last + 1))
            if there and best[last + 1][0] == 0:
                break  # nothing is better than this
        best[first] = min(readings)
    found, at = [], 0
    while at < len(pieces):
        end = best[at][2]
        found.append(text[spans[at][0] : spans[end - 1][1]].strip())
        at = end
    return [path for path in found if path]


def _is_there(piece: str) -> bool:
    plain = _ESCAPE.sub(r"\1", piece)
    return exists(piece) or exists(plain) or _matches(piece) or _matches(plain)


def _says_so(piece: str) -> bool:
    """Whether a piece says itself that it is one path."""
    return _quoted_text(piece) is not None or _REFERS.search(piece) is not None


def _pieces(text: str, lists: bool = False) -> list[str]:
    """``text`` parted at the commas outside of quotes, and with ``lists`` outside of brackets that begin a piece."""
    pieces = []
    while text:
        match = _IN_QUOTES.match(text) or (_IN_BRACKETS.match(text) if lists else None) or _UP_TO_COMMA.match(text)
        assert match is not None, "the last pattern takes anything"
        pieces.append(match[0])
        text = text[match.end() + 1 :]
        if match.end() + 1 == len(match.string):
            pieces.append("")  # behind a last comma
    return pieces


def _spans(text: str, pieces: list[str]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for piece in pieces:
        spans.append((at, at + len(piece)))
        at += len(piece) + 1
    return spans


_UP_TO_COMMA = re.compile(r"(?:\$\{[^}]*\}|[^,])*", re.DOTALL)
_IN_BRACKETS = re.compile(r"\s*\[[^\]]*\]\s*(?=,|$)", re.DOTALL)
_IN_QUOTES = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*(?=,|$)""", re.DOTALL)


def _quoted_text(piece: str) -> str | None:
    """What stands between the quotes of a piece that Hydra takes for a quoted text; None of any other."""
    if len(piece) < 2 or piece[0] not in "\"'" or piece[-1] != piece[0]:
        return None
    override = parsed(f"x={piece}")
    return override._value.text if override is not None and isinstance(override._value, QuotedString) else None


# ---------------------------------------------------------------------------------------- Hydra's grammar


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
    return _in_quotes(re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text))


def _in_quotes(text: str) -> str:
    return QuotedString(text, Quote.double).with_quotes()


def _left_to_hydra(word: str, hint: Any, several: bool) -> str:
    """A setting that Hydra reads.

    ``KEY=VALUE`` becomes ``++KEY=VALUE``, which Hydra takes whatever KEY is, so that a misspelt key reaches the schema,
    which knows what was meant and tells all problems together. So does a value that the grammar refuses and that is
    none of the setting's type anyway.
    """
    head, equal, value = word.partition("=")
    ours = bool(equal) and re.fullmatch(r"\w+(\.[\w-]+)*", head) and not head.startswith("hydra.")
    argument = f"++{word}" if ours and not _is_group(head) else word
    override = parsed(argument)
    texts = _takes_texts(hint)
    if override is not None and not (override.is_sweep_override() and not several):
        return argument
    if override is not None:
        one = _suggested(head, value, texts)
        raise UserError(
            f"{shlex.quote(word)}: several values, for one job; with -m in front there is a job for each"
            + (f", and {one} is one value" if one else "")
        )
    if texts or dataclasses.is_dataclass(_bare(hint)) or typing.get_origin(_bare(hint)) is dict or not ours:
        one = _suggested(head, value, texts or "text")
        raise UserError(f"{shlex.quote(word)} cannot be read" + (f"; in quotes it can: {one}" if one else ""))
    return f"{argument.partition('=')[0]}={quoted(value)}"


def _takes_texts(hint: Any) -> Literal["text", "list", ""]:
    bare = _bare(hint)
    if bare is str:
        return "text"
    return "list" if typing.get_origin(bare) is tuple and _bare(typing.get_args(bare)[0]) is str else ""


def _suggested(key: str, value: str, texts: str) -> str:
    """``'KEY="VALUE"'`` for a shell, once Hydra has read it; empty where no quoting helps."""
    tries = [quoted(value.strip())] if texts == "text" else []
    if texts == "list":
        inside = value.strip().removeprefix("[").removesuffix("]")
        pieces = [piece.strip() for piece in _pieces(inside)]
        tries = [f"[{','.join(piece if _plain(piece) else quoted(piece) for piece in pieces)}]"]
    good = [text for text in tries if (found := parsed(f"{key}={text}")) and not found.is_sweep_override()]
    return shlex.quote(f"{key}={good[0]}") if good else ""


def _plain(piece: str) -> bool:
    """Whether Hydra takes a piece of a list for the text that it is."""
    override = parsed(f"x={piece}")
    return override is not None and (override._value == piece or isinstance(override._value, QuotedString))


def explained(error: Exception, door: Door) -> str:
    """What Hydra found wrong with a command line or with the files of settings, in a message without its machinery."""
    missing, options = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    if missing is not None and options:
        group, _, name = str(missing).rpartition("/")
        there = [option for option in options if option != "base"]
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"; did you mean {group}={near[0]}?" if near else ""
        if not near and group in ("data", "chat") and os.path.lexists(os.path.expanduser(name)):
            hint = f"; your own text is {shlex.quote(f'{group}.files={name}')}"
        return f"{group}={name}: there is no such choice; there are {', '.join(there)}{hint}"
    found = re.search(r"Could not override '([^'.]*)'", str(error))
    if found is not None:
        return f"{found[1]}=…: stack.{door.name} has no such group; --help lists its groups"
    lines = [line for line in str(error).splitlines() if line.strip() and "https://hydra.cc" not in line]
    cause = error.__cause__
    return "\n".join([*lines, *([str(cause)] if cause is not None else [])])
