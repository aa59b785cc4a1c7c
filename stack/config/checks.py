"""From composed values to typed settings: every problem in them, and every contradiction, told together."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from stack.config.schema import (
    LENGTHS,
    Audit,
    Chat,
    Config,
    Dashboard,
    Data,
    FineTune,
    Model,
    Planned,
    Report,
    Run,
    Train,
)
from stack.core.errors import UserError

Schema = TypeVar("Schema", Config, Planned, FineTune, Chat, Audit, Dashboard, Report)


def typed(config: DictConfig | dict[str, Any], schema: type[Schema] = Config) -> Schema:
    """The composed configuration as frozen objects; raises one :class:`UserError` with every problem in it."""
    values = config if isinstance(config, dict) else _plain_values(config)
    try:
        result = TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        found = [_describe(problem, schema) for problem in error.errors()]
    else:
        found = problems(result)
    if found:
        plural = "problem" if len(found) == 1 else "problems"
        raise UserError(f"{len(found)} {plural} in the configuration:\n" + "\n".join(f"  {line}" for line in found))
    return result


def _plain_values(config: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def _describe(problem: Any, schema: type) -> str:
    """One line for one finding of pydantic: the flag, what is wrong, the value, the way out."""
    *path, last = [str(part) for part in problem["loc"]]
    flag = ".".join([*path, last])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = keys_at(path, schema)
        close = difflib.get_close_matches(last, known, n=1)
        hint = f"did you mean {'.'.join([*path, close[0]])}?" if close else f"known here: {', '.join(known)}"
        return f"{flag}: there is no such setting; {hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{flag}: a value is missing; give {flag}=VALUE"
    return f"{flag}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def keys_at(path: list[str], schema: type) -> list[str]:
    """The settings that exist below a dotted path; the name of a source may be any text."""
    root = _json_schema(schema)
    node: dict[str, Any] = root
    for part in path:
        node = node.get("properties", {}).get(part, node.get("additionalProperties")) or {}
        reference = node.get("$ref") or next((o["$ref"] for o in node.get("anyOf", []) if "$ref" in o), None)
        if reference:
            node = root["$defs"][reference.rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


@cache
def _json_schema(schema: type) -> dict[str, Any]:
    return TypeAdapter(schema).json_schema()


def problems(c: Config | FineTune | Chat | Audit | Dashboard | Report) -> list[str]:
    """Every contradiction between settings that are each valid, one line each, naming the flag to change."""
    checks = []
    if isinstance(c, Config):
        checks += [
            *_of_model(c.model, c.train),
            *_of_data("data", c.data),
            _of_name("tokenizer.name", c.tokenizer.name),
        ]
    if isinstance(c, FineTune):
        checks += _of_data("chat", c.chat)
    if isinstance(c, Run):
        checks += [_of_length(c.train), _of_name("name", c.name)]
    if isinstance(c, Chat):
        checks.append((c.prompt is None or c.prompt_file is None, "give either prompt or prompt_file, not both"))
    return [line for holds, line in checks if not holds]


_Check = tuple[bool, str]  # what must hold, and the line that says what is wrong where it does not


def _of_model(m: Model, t: Train) -> list[_Check]:
    return [
        (
            m.heads % m.kv_heads == 0,
            f"model.heads={m.heads} is not a multiple of model.kv_heads={m.kv_heads}; change one of them",
        ),
        (
            t.window <= m.context,
            f"train.window={t.window} is longer than model.context={m.context}; lower the one or raise the other",
        ),
    ]


def _of_length(t: Train) -> _Check:
    lengths = {f"train.{key}": getattr(t, key) for key in LENGTHS}
    given = [f"{flag}={value}" for flag, value in lengths.items() if value is not None]
    return (
        len(given) == 1,
        f"exactly one of {', '.join(lengths)} says how long to train (here: {', '.join(given) or 'none'}); "
        "set the others to null",
    )


def _of_data(group: str, data: Data) -> list[_Check]:
    sources = data.resolved_sources()
    return [
        (
            bool(sources) or data.packed is not None,
            f"no text: give {group}.files=a.jsonl, {group}.hub.path=NAME or a {group} group",
        ),
        _of_name(f"{group}.name", data.name),
        *(
            (
                bool(source.files) != (source.hub is not None),
                f"{group}.sources.{key}: give either files or hub (here: files={list(source.files)}, hub={source.hub})",
            )
            for key, source in sources.items()
        ),
    ]


def _of_name(flag: str, name: str) -> _Check:
    plain_name = name not in ("", ".", "..") and "/" not in name and "\\" not in name
    return plain_name, f"{flag}={name!r}: must be the plain name of one folder"
