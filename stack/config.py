"""The typed configuration: frozen dataclasses, every cross-field check, and the way an entry point starts.

Hydra composes the YAML groups under ``conf/``; :func:`typed` turns the result once into these objects, strictly:
an unknown key, a missing one or a wrong type is a problem, all problems are told together, and no code below the
entry points sees a ``DictConfig``.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")
_HERE = Path(__file__).resolve().parent
# The configurations stand beside the package in a checkout and inside it in a wheel.
CONF = str(next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir()))


class UserError(ValueError):
    """What a person can mend. Entry points print its message alone and exit with 2."""


class EchoError(UserError):
    """A :class:`UserError` of rank 0 as another rank raises it: told already."""


@dataclass(frozen=True, config=_STRICT)
class Model:
    """Shape of the decoder (Hugging Face's ``Qwen3``; ``Llama`` with ``qk_norm=false``)."""

    layers: int
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    init_std: float
    zero_init: bool  # output projections (o_proj, down_proj) start at zero instead of init_std / sqrt(2 * layers)
    softcap: float | None  # logits become softcap * tanh(logits / softcap); native only
    scale_input: bool  # hidden states enter as sqrt(d) * row; native only

    @property
    def native_only(self) -> bool:
        """True where no stock architecture computes the same function."""
        return self.softcap is not None or self.scale_input


@dataclass(frozen=True, config=_STRICT)
class Tokenizer:
    """How the byte-level BPE is trained, or which finished folder is taken."""

    name: str
    vocab_size: int
    sample_mb: float  # at most this much text is sampled for training, spread over the sources by weight
    seed: int
    folder: str | None  # take this tokenizer and train none


@dataclass(frozen=True, config=_STRICT)
class Hub:
    """A data set of the Hugging Face hub, or a local data set folder."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = True


@dataclass(frozen=True, config=_STRICT)
class Source:
    """One source of text: local files or a hub set, with a weight."""

    files: tuple[str, ...] = ()
    hub: Hub | None = None
    text: str = "text"  # the field that holds the text
    weight: float = 1.0  # a document is packed floor(weight) times, plus once more by a seeded coin
    max_mb: float | None = None  # stop reading after this much text (MB of UTF-8)


@dataclass(frozen=True, config=_STRICT)
class HubFlags:
    """``data.hub.path=…`` on the command line: one hub set in the place of the group's sources."""

    path: str | None
    name: str | None
    split: str
    revision: str | None
    streaming: bool


@dataclass(frozen=True, config=_STRICT)
class Data:
    """The text, and how it is packed."""

    name: str
    sources: dict[str, Source]
    files: tuple[str, ...]  # one's own files, in the place of the group's sources
    hub: HubFlags
    text: str
    on_bad_row: Literal["skip", "error"]
    validation: float  # share of the documents that is held out, by a stable hash of the text
    seed: int
    workers: int  # processes that encode; 0: one per processor
    shard_mb: float  # size at which a shard is closed
    packed: str | None  # train on this packed folder and pack none

    def resolved_sources(self) -> dict[str, Source]:
        """The sources in force: ``data.files`` and ``data.hub.path`` replace the group's own."""
        own: dict[str, Source] = {}
        if self.files:
            own["files"] = Source(files=self.files, text=self.text)
        if self.hub.path is not None:
            own["hub"] = Source(hub=Hub(**dataclasses.asdict(self.hub)), text=self.text)
        return own or self.sources


@dataclass(frozen=True, config=_STRICT)
class Optim:
    """AdamW for every parameter, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["muon", "adamw"]
    lr: float  # AdamW's
    matrix_lr: float  # Muon's, on AdamW's scale (the RMS of an update is 0.2 lr)
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # of hidden matrices; the table, the norms and all one-dimensional ones take table_decay
    table_decay: float
    momentum: float
    momentum_start: float  # Muon's momentum rises from here …
    momentum_warmup: int  # … over this many steps
    ns_steps: int


@dataclass(frozen=True, config=_STRICT)
class Schedule:
    """The factor of every learning rate at step s."""

    kind: Literal["wsd", "cosine", "constant"]
    warmup: int  # steps
    decay: float  # share of all steps (wsd)
    shape: Literal["linear", "sqrt"]  # of the decay (wsd): 1 - x, or 1 - sqrt(x)
    final: float  # factor at the end


@dataclass(frozen=True, config=_STRICT)
class Train:
    """One optimizer step and how many of them."""

    steps: int | None
    tokens: float | None
    minutes: float | None
    epochs: float | None
    window: int  # tokens
    global_batch: int  # windows in a step, over all ranks
    micro_batch: int  # windows in one forward pass of one rank
    clip: float  # largest gradient norm; 0: no clipping
    z_loss: float
    loss: Literal["full", "checkpoint", "fused"]
    chunk_tokens: int
    max_bad_steps: int


@dataclass(frozen=True, config=_STRICT)
class Evaluate:
    """Validation on the whole held-out split; always at the end as well."""

    every: int  # steps; 0: only at the end
    micro_batch: int  # windows in one forward pass


@dataclass(frozen=True, config=_STRICT)
class Sample:
    """Texts that the model continues, to look at."""

    every: int  # steps; 0: only at the end
    prompts: tuple[str, ...]
    tokens: int
    temperature: float


@dataclass(frozen=True, config=_STRICT)
class Checkpoint:
    """When a checkpoint is written and which ones stay."""

    every: int  # steps; 0: only at the end and on a signal
    keep: int  # newest ones that stay, beside the best


@dataclass(frozen=True, config=_STRICT)
class Parallel:
    """How ranks share the work."""

    kind: Literal["none", "ddp"]


@dataclass(frozen=True, config=_STRICT)
class Track:
    """What is shown and written while training."""

    every: int  # steps between two lines of metrics.jsonl
    progress: bool


@dataclass(frozen=True, config=_STRICT)
class Config:
    """All of ``python -m stack.train``."""

    name: str
    seed: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["auto", "float32", "bf16"]
    compile: Literal["auto", "on", "off"]
    resume: str | None  # a checkpoint of this run to go back to; the newest good one otherwise
    branch: str | None  # a checkpoint whose weights and moments start this new run
    data_dir: str
    runs_dir: str
    model: Model
    tokenizer: Tokenizer
    data: Data
    train: Train
    optim: Optim
    schedule: Schedule
    evaluate: Evaluate
    sample: Sample
    checkpoint: Checkpoint
    parallel: Parallel
    track: Track


def plain(config: Any) -> dict[str, Any]:
    """The configuration as nested plain values, for YAML, JSON and digests."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


def typed(config: DictConfig | dict[str, Any]) -> Config:
    """The composed configuration as frozen objects; raises one :class:`UserError` with every problem in it."""
    try:
        values = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {error}") from error
    try:
        result = TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        found = [_describe(problem) for problem in error.errors()]
    else:
        found = problems(result)
    if found:
        plural = "problem" if len(found) == 1 else "problems"
        raise UserError(f"{len(found)} {plural} in the configuration:\n" + "\n".join(f"  {line}" for line in found))
    return result


def _describe(problem: Any) -> str:
    """One line for one finding of pydantic: the flag, what is wrong, the value, the way out."""
    *path, last = [str(part) for part in problem["loc"]]
    flag = ".".join([*path, last])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(path)
        close = difflib.get_close_matches(last, known, n=1)
        hint = f"did you mean {'.'.join([*path, close[0]])}?" if close else f"known here: {', '.join(known)}"
        return f"{flag}: there is no such setting; {hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{flag}: a value is missing; give {flag}=VALUE"
    return f"{flag}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _keys_at(path: list[str]) -> list[str]:
    """The settings that exist below a dotted path."""
    schema = TypeAdapter(Config).json_schema()
    node: dict[str, Any] = schema
    for part in path:
        node = node.get("properties", {}).get(part, node.get("additionalProperties", {}))
        reference = node.get("$ref") or next((o["$ref"] for o in node.get("anyOf", []) if "$ref" in o), None)
        if reference:
            node = schema["$defs"][reference.rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


def problems(c: Config) -> list[str]:
    """Every contradiction between settings, one line each, each naming the flag to change."""
    found: list[str] = []

    def need(holds: bool, line: str) -> None:
        if not holds:
            found.append(line)

    m, t, o, s, d = c.model, c.train, c.optim, c.schedule, c.data
    for flag, value in (
        ("model.layers", m.layers),
        ("model.d", m.d),
        ("model.heads", m.heads),
        ("model.kv_heads", m.kv_heads),
        ("model.ffn", m.ffn),
        ("train.global_batch", t.global_batch),
        ("train.micro_batch", t.micro_batch),
        ("train.chunk_tokens", t.chunk_tokens),
        ("train.max_bad_steps", t.max_bad_steps),
        ("evaluate.micro_batch", c.evaluate.micro_batch),
        ("sample.tokens", c.sample.tokens),
        ("checkpoint.keep", c.checkpoint.keep),
        ("track.every", c.track.every),
        ("optim.ns_steps", o.ns_steps),
    ):
        need(value >= 1, f"{flag}={value}: must be at least 1")
    for flag, value in (
        ("train.clip", t.clip),
        ("train.z_loss", t.z_loss),
        ("optim.weight_decay", o.weight_decay),
        ("optim.table_decay", o.table_decay),
        ("optim.momentum_warmup", o.momentum_warmup),
        ("schedule.warmup", s.warmup),
        ("evaluate.every", c.evaluate.every),
        ("sample.every", c.sample.every),
        ("sample.temperature", c.sample.temperature),
        ("checkpoint.every", c.checkpoint.every),
        ("data.workers", d.workers),
    ):
        need(value >= 0, f"{flag}={value}: must not be negative")
    for flag, value in (
        ("optim.lr", o.lr),
        ("optim.matrix_lr", o.matrix_lr),
        ("optim.eps", o.eps),
        ("data.shard_mb", d.shard_mb),
        ("tokenizer.sample_mb", c.tokenizer.sample_mb),
        ("model.rope_theta", m.rope_theta),
        ("model.norm_eps", m.norm_eps),
        ("model.softcap", 1.0 if m.softcap is None else m.softcap),
    ):
        need(value > 0, f"{flag}={value}: must be greater than 0")
    for flag, value in (
        ("optim.beta1", o.beta1),
        ("optim.beta2", o.beta2),
        ("optim.momentum", o.momentum),
        ("optim.momentum_start", o.momentum_start),
    ):
        need(0 <= value < 1, f"{flag}={value}: must lie in [0, 1)")
    need(
        0 < d.validation < 1,
        f"data.validation={d.validation}: must lie between 0 and 1; it is a share of the documents",
    )
    need(0 <= s.decay <= 1, f"schedule.decay={s.decay}: must lie in [0, 1]; it is a share of all steps")
    need(0 <= s.final <= 1, f"schedule.final={s.final}: must lie in [0, 1]")
    if m.kv_heads >= 1:
        need(
            m.heads % m.kv_heads == 0,
            f"model.heads={m.heads} is not a multiple of model.kv_heads={m.kv_heads}; change one of them",
        )
    need(m.head_dim >= 2 and m.head_dim % 2 == 0, f"model.head_dim={m.head_dim}: must be even, for the rotation")
    need(t.window >= 2, f"train.window={t.window}: must be at least 2")
    need(
        t.window <= m.context,
        f"train.window={t.window} is longer than model.context={m.context}; lower the one or raise the other",
    )
    lengths = {f"train.{key}": getattr(t, key) for key in LENGTHS}
    given = {flag: value for flag, value in lengths.items() if value is not None}
    if len(given) != 1:
        have = ", ".join(f"{flag}={value}" for flag, value in given.items()) or "none"
        found.append(
            f"exactly one of {', '.join(lengths)} says how long to train (here: {have}); set the others to null"
        )
    for flag, value in given.items():
        need(value > 0, f"{flag}={value}: must be greater than 0")
    need(
        c.tokenizer.vocab_size >= MIN_VOCABULARY,
        f"tokenizer.vocab_size={c.tokenizer.vocab_size}: must be at least {MIN_VOCABULARY} "
        "(256 bytes and two control tokens, up to a multiple of 64)",
    )
    need(
        c.tokenizer.vocab_size % 64 == 0,
        f"tokenizer.vocab_size={c.tokenizer.vocab_size}: must be a multiple of 64, as the table's rows are",
    )
    for flag, name in (("name", c.name), ("tokenizer.name", c.tokenizer.name), ("data.name", d.name)):
        need(
            name not in ("", ".", "..") and "/" not in name and "\\" not in name,
            f"{flag}={name!r}: must be the plain name of one folder",
        )
    need(
        c.resume is None or c.branch is None,
        f"resume={c.resume} and branch={c.branch} exclude each other: resume goes on, branch starts a new run",
    )
    sources = d.resolved_sources()
    need(
        bool(sources) or d.packed is not None, "no text: give data.files='[a.txt]', data.hub.path=NAME or a data group"
    )
    for key, source in sources.items():
        flag = f"data.sources.{key}"
        need(
            bool(source.files) != (source.hub is not None),
            f"{flag}: give either files or hub (here: files={list(source.files)}, hub={source.hub})",
        )
        need(source.weight >= 0, f"{flag}.weight={source.weight}: must not be negative")
        need(source.max_mb is None or source.max_mb > 0, f"{flag}.max_mb={source.max_mb}: must be greater than 0")
    return found


LENGTHS = ("steps", "tokens", "minutes", "epochs")  # of train; exactly one is given
MIN_VOCABULARY = 320


def entry(config_name: str, job: Callable[[Config], int]) -> Callable[[], None]:
    """The ``main`` of an entry point: compose ``conf/CONFIG_NAME.yaml`` with the command line, then ``job``.

    ``job`` returns the exit code. A :class:`UserError`, and what Hydra finds wrong with the command line, print one
    message and exit with 2; any other exception keeps its traceback and exits with 1.
    """
    composed = False

    def run(values: DictConfig) -> None:
        nonlocal composed
        composed = True
        try:
            sys.exit(job(typed(values)))
        except UserError as error:
            if not isinstance(error, EchoError):
                print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception:
            # Hydra would cut the traceback of its job short.
            traceback.print_exc()
            sys.exit(1)

    def main() -> None:
        try:
            hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(run)()
        except SystemExit as stop:
            sys.exit(2 if stop.code == 1 and not composed else stop.code)

    return main
