"""The typed configuration: frozen dataclasses, every cross-field check, and the way an entry point starts.

Hydra composes the YAML groups under ``conf/``; :func:`typed` turns the result once into these objects, strictly:
an unknown key, a missing one or a wrong type is a problem, all problems are told together, and no code below the
entry points sees a ``DictConfig``.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:  # imported where it is needed: an encoding process composes nothing
    from omegaconf import DictConfig

# A name may look like a number: name=2024.
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
_HERE = Path(__file__).resolve().parent
# The configurations stand beside the package in a checkout and inside it in a wheel.
CONF = str(next(folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir()))


MIN_VOCABULARY = 320  # 256 bytes and two control tokens, up to a multiple of 64
LENGTHS = ("steps", "tokens", "minutes", "epochs")  # of train; exactly one is given
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)  # a person can mend it
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean


class UserError(ValueError):
    """What a person can mend. Entry points print its message alone and exit with 2."""


class EchoError(UserError):
    """A :class:`UserError` of rank 0 as another rank raises it: told already."""


@dataclass(frozen=True, config=_STRICT)
class Model:
    """Shape of the decoder (Hugging Face's ``Qwen3``; ``Llama`` with ``qk_norm=false``)."""

    layers: Count
    d: Count
    heads: Count
    kv_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]  # the rotation takes pairs
    ffn: Count
    context: Count
    rope_theta: Positive
    norm_eps: Positive
    qk_norm: bool
    init_std: NotNegative
    zero_init: bool  # output projections (o_proj, down_proj) start at zero instead of init_std / sqrt(2 * layers)
    softcap: Positive | None  # logits become softcap * tanh(logits / softcap); native only
    scale_input: bool  # hidden states enter as sqrt(d) * row; native only

    @property
    def native_only(self) -> bool:
        """True where no stock architecture computes the same function."""
        return self.softcap is not None or self.scale_input


@dataclass(frozen=True, config=_STRICT)
class Tokenizer:
    """How the byte-level BPE is trained, or which finished folder is taken."""

    name: str
    vocab_size: Annotated[int, Field(ge=MIN_VOCABULARY, multiple_of=64)]  # as the table's rows are
    sample_mb: Positive  # at most this much text is sampled for training, spread over the sources by weight
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
    weight: NotNegative = 1.0  # a document is packed floor(weight) times, plus once more by a seeded coin
    max_mb: Positive | None = None  # stop reading after this much text (MB of UTF-8)
    validation: Annotated[float, Field(ge=0, lt=1)] | None = None  # held out, in the place of the group's share


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
    validation: Annotated[
        float, Field(ge=0, lt=1)
    ]  # share of the documents that is held out, by a stable hash of the text; 0: train without validation
    seed: int
    workers: Natural  # processes that encode; 0: one per processor
    shard_mb: Positive  # size at which a shard is closed
    packed: str | None  # train on this packed folder and pack none

    def resolved_sources(self) -> dict[str, Source]:
        """The sources in force: ``data.files`` and ``data.hub.path`` replace the group's own."""
        own: dict[str, Source] = {}
        if self.files:
            own["files"] = Source(files=self.files, text=self.text)
        if self.hub.path is not None:
            own["hub"] = Source(hub=Hub(**dataclasses.asdict(self.hub)), text=self.text)
        return own or self.sources

    def share_of(self, source: Source) -> float:
        """The share of a source's documents that is held out."""
        return self.validation if source.validation is None else source.validation

    def measured_share_of(self, source: Source) -> float:
        """The share whose loss is measured; of a source that holds out more than the group, the rest is only asked."""
        return min(self.share_of(source), self.validation)


@dataclass(frozen=True, config=_STRICT)
class TalkSource(Source):
    """One source of conversations, and what a good answer to one of them is."""

    text: str = "messages"  # the field that holds the list of messages
    check: Literal["none", "exact"] = "none"  # exact: the reference answer, character by character
    headings: tuple[str, ...] = ()  # lines that stand in every good answer


@dataclass(frozen=True, config=_STRICT)
class Conversations(Data):
    """The conversations, and how they are packed."""

    sources: dict[str, TalkSource]
    too_long: Literal["cut", "drop"]  # cut: end after the last whole assistant turn that fits, if there is one

    def resolved_sources(self) -> dict[str, TalkSource]:
        """The sources in force: ``chat.files`` and ``chat.hub.path`` replace the group's own."""
        return {
            key: source if isinstance(source, TalkSource) else TalkSource(**source.__dict__)
            for key, source in super().resolved_sources().items()
        }


@dataclass(frozen=True, config=_STRICT)
class Sft:
    """What fine-tuning adds to training."""

    tokens: tuple[str, ...]  # control tokens that the vocabulary grows by, where it has not got them
    optimizer: Literal["continue", "fresh"]  # keep the base's moments, or start without
    replay: Annotated[float, Field(ge=0, lt=1)]  # share of each step's windows that are pretraining text
    replay_data: str | None  # a packed folder for replay; the base's own otherwise
    show: Natural  # print so many packed conversations with what is supervised coloured, and stop
    answers: Natural  # held-out conversations of each source that are answered and checked at every validation
    answer_tokens: Count  # the most tokens of such an answer


@dataclass(frozen=True, config=_STRICT)
class Optim:
    """AdamW for every parameter, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["muon", "adamw"]
    lr: Positive  # AdamW's
    matrix_lr: Positive  # Muon's, on AdamW's scale (the RMS of an update is 0.2 lr)
    beta1: Decay
    beta2: Decay
    eps: Positive
    weight_decay: NotNegative  # of hidden matrices; the table, the norms and all one-dimensional ones take table_decay
    table_decay: NotNegative
    momentum: Decay
    momentum_start: Decay  # Muon's momentum rises from here …
    momentum_warmup: Natural  # … over this many steps
    ns_steps: Count


@dataclass(frozen=True, config=_STRICT)
class Schedule:
    """The factor of every learning rate at step s."""

    kind: Literal["wsd", "cosine", "constant"]
    warmup: Natural  # steps
    decay: Share  # share of all steps (wsd)
    shape: Literal["linear", "sqrt"]  # of the decay (wsd): 1 - x, or 1 - sqrt(x)
    final: Share  # factor at the end


@dataclass(frozen=True, config=_STRICT)
class Train:
    """One optimizer step and how many of them."""

    steps: Count | None
    tokens: Positive | None
    minutes: Positive | None
    epochs: Positive | None
    window: Annotated[int, Field(ge=2)]  # tokens
    global_batch: Count  # windows in a step, over all ranks
    micro_batch: Count  # the most windows in one forward pass of one rank
    clip: NotNegative  # largest gradient norm; 0: no clipping
    z_loss: NotNegative
    loss: Literal["full", "checkpoint", "fused"]
    chunk_tokens: Count
    max_bad_steps: Count

    def largest_forward(self, ranks: int) -> int:
        """The windows of a rank's largest forward pass: its share of a batch may have fewer than ``micro_batch``."""
        return min(self.micro_batch, -(-self.global_batch // ranks))


@dataclass(frozen=True, config=_STRICT)
class Evaluate:
    """Validation on the whole held-out split; always at the end as well."""

    every: Natural  # steps; 0: only at the end
    micro_batch: Count  # windows in one forward pass


@dataclass(frozen=True, config=_STRICT)
class Sample:
    """Texts that the model continues, to look at."""

    every: Natural  # steps; 0: only at the end
    prompts: tuple[str, ...]
    tokens: Count
    temperature: NotNegative


@dataclass(frozen=True, config=_STRICT)
class Diagnostics:
    """What is measured of a run beside its loss."""

    rows_every: Natural  # steps between two looks at the rows of the table, and one at the end; 0: none


@dataclass(frozen=True, config=_STRICT)
class Checkpoint:
    """When a checkpoint is written and which ones stay."""

    every: Natural  # steps; 0: only at the end and on a signal
    keep: Count  # newest ones that stay, beside the best


@dataclass(frozen=True, config=_STRICT)
class Parallel:
    """How ranks share the work."""

    kind: Literal["none", "ddp"]


@dataclass(frozen=True, config=_STRICT)
class Track:
    """What is shown and written while training."""

    every: Count  # steps between two lines of metrics.jsonl
    progress: bool
    mode: Literal["auto", "online", "offline", "disabled"]  # of wandb; metrics.jsonl is always written
    project: str
    entity: str | None  # user or team on the server; the key's own otherwise
    stall_minutes: NotNegative  # without a step, before an alert; 0: never
    report: bool  # write audit.json and report.html into runs/NAME at the end


@dataclass(frozen=True, config=_STRICT)
class Run:
    """What pretraining and fine-tuning share."""

    name: str
    seed: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["auto", "float32", "bf16"]
    compile: Literal["auto", "on", "off"]
    resume: str | None  # a checkpoint of this run to go back to; the newest good one otherwise
    data_dir: str
    runs_dir: str
    train: Train
    optim: Optim
    schedule: Schedule
    evaluate: Evaluate
    sample: Sample
    diagnostics: Diagnostics
    checkpoint: Checkpoint
    parallel: Parallel
    track: Track


@dataclass(frozen=True, config=_STRICT)
class Config(Run):
    """All of ``python -m stack.train``."""

    branch: str | None  # a checkpoint whose weights and moments start this new run
    model: Model
    tokenizer: Tokenizer
    data: Data


@dataclass(frozen=True, config=_STRICT)
class Machine:
    """The machine that a plan is for, and what is assumed of it."""

    name: str
    device: Literal["cpu", "cuda", "mps"] | None  # null: what ``device`` says
    memory_gb: Positive | None  # null: what is free here
    tflops: Positive | None  # dense peak of its GEMMs; null: measured here
    mfu: Annotated[float, Field(gt=0, le=1)]  # share of the peak that training gets, by 12 L d S
    count: Count  # devices that share the work
    price: NotNegative  # of one device, dollars an hour
    packing_mb_s: Positive  # text that one process encodes


@dataclass(frozen=True, config=_STRICT)
class Planned(Config):
    """All of ``python -m stack.plan``."""

    plan: Machine


@dataclass(frozen=True, config=_STRICT)
class FineTune(Run):
    """All of ``python -m stack.sft``."""

    base: str  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama
    chat: Conversations
    sft: Sft


@dataclass(frozen=True, config=_STRICT)
class Chat:
    """All of ``python -m stack.chat``."""

    checkpoint: str  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama
    prompt: str | None  # one shot: any text, taken as it is
    prompt_file: str | None  # one shot from a file
    system: str | None  # a system turn in front
    tokens: Count  # the most tokens of an answer
    temperature: NotNegative  # 0: the likeliest token
    top_k: Natural  # 0: all
    top_p: Annotated[float, Field(gt=0, le=1)]
    seed: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["auto", "float32", "bf16"]
    runs_dir: str  # where a run is looked for by its name


@dataclass(frozen=True, config=_STRICT)
class Audit:
    """All of ``python -m stack.audit``."""

    checkpoint: str  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama, tied or not
    counts: str | None  # a packed folder whose occurrences are shown; those that a checkpoint names otherwise
    unused: tuple[Natural, ...]  # ids of rows that are known to be unused; found in the vocabulary otherwise
    top: Count  # rows that are listed
    json: str | None  # a file for all of it; "-" is standard output
    runs_dir: str  # where a run is looked for by its name


@dataclass(frozen=True, config=_STRICT)
class Dashboard:
    """All of ``python -m stack.dashboard``."""

    name: str
    file: str  # where it is written when not online
    group_by: tuple[str, ...]  # keys of the runs' configuration; runs with equal values are drawn as one
    track: Track


@dataclass(frozen=True, config=_STRICT)
class Report:
    """All of ``python -m stack.report``."""

    runs: Annotated[tuple[str, ...], Field(min_length=1)]  # names or folders; several stand side by side
    out: str | None  # the page
    runs_dir: str  # where a run is looked for by its name


Schema = TypeVar("Schema", Config, Planned, FineTune, Chat, Audit, Dashboard, Report)


def plain(config: Any) -> dict[str, Any]:
    """The configuration as nested plain values, for YAML, JSON and digests."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


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
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {error}") from error


def _describe(problem: Any, schema: type) -> str:
    """One line for one finding of pydantic: the flag, what is wrong, the value, the way out."""
    *path, last = [str(part) for part in problem["loc"]]
    flag = ".".join([*path, last])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(path, schema)
        close = difflib.get_close_matches(last, known, n=1)
        hint = f"did you mean {'.'.join([*path, close[0]])}?" if close else f"known here: {', '.join(known)}"
        return f"{flag}: there is no such setting; {hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{flag}: a value is missing; give {flag}=VALUE"
    return f"{flag}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _keys_at(path: list[str], schema: type) -> list[str]:
    """The settings that exist below a dotted path."""
    root = TypeAdapter(schema).json_schema()
    node: dict[str, Any] = root
    for part in path:
        node = node.get("properties", {}).get(part, node.get("additionalProperties", {}))
        reference = node.get("$ref") or next((o["$ref"] for o in node.get("anyOf", []) if "$ref" in o), None)
        if reference:
            node = root["$defs"][reference.rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


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
            f"no text: give {group}.files='[a.jsonl]', {group}.hub.path=NAME or a {group} group",
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


def entry(
    config_name: str, schema: type[Schema], job: Callable[[Schema], int], *, raw: tuple[str, ...] = ()
) -> Callable[[], None]:
    """The ``main`` of an entry point: compose ``conf/CONFIG_NAME.yaml`` with the command line, then ``job``.

    Settings named in ``raw`` are texts of a person: they are taken as they are and never parsed.

    ``job`` returns the exit code. A :class:`UserError`, and what Hydra finds wrong with the command line, print one
    message and exit with 2; any other exception keeps its traceback and exits with 1.
    """
    code: int | None = None  # None: Hydra did not come to the job
    texts: dict[str, str] = {}

    def run(values: DictConfig) -> None:
        nonlocal code
        code = 1
        try:
            code = job(typed({**_plain_values(values), **texts}, schema))
        except UserError as error:
            if not isinstance(error, EchoError):
                rank = os.environ.get("RANK", "0")
                print(f"error: {error}" if rank == "0" else f"rank {rank}: error: {error}", file=sys.stderr)
            code = 2
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from what is finished", file=sys.stderr)
            code = 130
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                print(f"error: {error}; make room, or give other folders with data_dir and runs_dir", file=sys.stderr)
                code = 2
            else:
                traceback.print_exc()  # Hydra would cut it short

    def main() -> None:
        nonlocal code
        given = [(argument, *argument.partition("=")[::2]) for argument in sys.argv[1:]]
        code = None
        texts.clear()  # of an earlier call
        texts.update({key: value for argument, key, value in given if key in raw and "=" in argument})
        sys.argv[1:] = [_left_to_us(argument) for argument, key, _ in given if key not in texts]
        import hydra

        try:
            hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(run)()
        except SystemExit as stop:
            code = 2 if code is None and stop.code else stop.code
        sys.exit(code)

    return main


def command() -> str | None:
    """The command line that started this process, to be given again; None where it is none of this program's.

    ``resume=`` is left out: it went back once, and going on does not.
    """
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    given = [text.removeprefix("++") for text in HydraConfig.get().overrides.task]
    name = HydraConfig.get().job.config_name
    python = Path(sys.executable)
    here = python.parent.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else Path()
    start = [str(here / "python")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = (int(os.environ[key]) for key in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        nodes = [f"--nnodes={world // local}"] if world > local else []
        start = [str(here / "torchrun"), *nodes, f"--nproc-per-node={local}"]
    return shlex.join([*start, "-m", f"stack.{name}", *(text for text in given if not text.startswith("resume="))])


def _left_to_us(argument: str) -> str:
    """``KEY=VALUE`` as ``++KEY=VALUE``, which Hydra takes whatever KEY is.

    So a misspelt key reaches :func:`typed`, which knows what was meant and tells all problems together.
    """
    key, equal, _ = argument.partition("=")
    ours = bool(equal) and re.fullmatch(r"\w+(\.\w+)*", key) and not key.startswith("hydra.")
    return f"++{argument}" if ours and not (Path(CONF) / key).is_dir() else argument
