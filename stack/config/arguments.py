"""What a person types behind ``python -m stack.DOOR``, and what Hydra gets of it.

Hydra's grammar is made for numbers and short words: ``~``, ``(``, ``=``, ``'`` and most letters outside of ASCII are
errors in it. So the schema says of a setting that it is a path, a list of paths or a text, and such a value is taken as
it is typed: it reaches Hydra in quotes. Everything else is Hydra's to read (lists, sweeps, ``${…}``), and what it
cannot read is told with the quoting that works.
How a path is read is said in :mod:`stack.config.paths`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import glob
import os
import re
import shlex
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from hydra._internal.utils import get_args_parser

from stack.config.grammar import is_plain, parsed, quoted, quoted_text
from stack.config.kinds import Kind, bare, hint_of, kind_of
from stack.config.paths import exists, path_for_hydra, paths_of, pieces_of
from stack.core.errors import UserError

_HERE = Path(__file__).resolve().parent.parent
# The configurations stand beside the package in a checkout and inside it in a wheel.
CONF = str(next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir()))


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
    if key is None or any(_known(word.partition("=")[0].strip(), door) and not exists(word) for word in words):
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
        choices = pieces_of(found[1], lists=True) if kind is Kind.PATHS else paths_of(found[1])
        ours = ",".join(path_for_hydra(kind, choice) for choice in choices)  # in Hydra's choice() quotes are lost
    else:
        _refuse_unclear(key, kind, value, several)
        ours = path_for_hydra(kind, value)
    return f"++{key}={ours}"


def _refuse_unclear(key: str, kind: Kind, value: str, several: bool) -> None:
    """A path under ``-m`` with commas that are not said to be its own."""
    if not several or "," not in value or exists(value) or value.startswith("[") or quoted_text(value) is not None:
        return
    if kind is Kind.PATHS and len(paths_of(value)) == 1:
        return
    one = f"[{value}]" if kind is Kind.PATHS else quoted(value)
    raise UserError(
        f"{shlex.quote(f'{key}={value}')} is not clear under -m: {shlex.quote(f'{key}=choice({value})')} is a job for "
        f"each, {shlex.quote(f'{key}={one}')} is one {'list' if kind is Kind.PATHS else 'path'}"
    )


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
    if texts or dataclasses.is_dataclass(bare(hint)) or typing.get_origin(bare(hint)) is dict or not ours:
        one = _suggested(head, value, texts or "text")
        raise UserError(f"{shlex.quote(word)} cannot be read" + (f"; in quotes it can: {one}" if one else ""))
    return f"{argument.partition('=')[0]}={quoted(value)}"


def _takes_texts(hint: Any) -> Literal["text", "list", ""]:
    plain = bare(hint)
    if plain is str:
        return "text"
    return "list" if typing.get_origin(plain) is tuple and bare(typing.get_args(plain)[0]) is str else ""


def _suggested(key: str, value: str, texts: str) -> str:
    """``'KEY="VALUE"'`` for a shell, once Hydra has read it; empty where no quoting helps."""
    tries = [quoted(value.strip())] if texts == "text" else []
    if texts == "list":
        inside = value.strip().removeprefix("[").removesuffix("]")
        pieces = [piece.strip() for piece in pieces_of(inside)]
        tries = [f"[{','.join(piece if is_plain(piece) else quoted(piece) for piece in pieces)}]"]
    good = [text for text in tries if (found := parsed(f"{key}={text}")) and not found.is_sweep_override()]
    return shlex.quote(f"{key}={good[0]}") if good else ""


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
