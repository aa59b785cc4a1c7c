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
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from yaml import YAMLError

from stack.config import arguments, sweep
from stack.config.arguments import CONF, Door, Given, Paths, PathText, Text
from stack.config.sweep import Job
from stack.core.errors import EchoError, LostError, UserError
from stack.core.home import home
from stack.core.streams import forgiving

# A name may look like a number: name=2024.
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

MIN_VOCABULARY = 320  # 256 bytes and two control tokens, up to a multiple of 64
LENGTHS = ("steps", "tokens", "minutes", "epochs")  # of train; exactly one is given
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)  # a person can mend it
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean


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
    folder: PathText | None  # take this tokenizer and train none


@dataclass(frozen=True, config=_STRICT)
class Hub:
    """A data set of the Hugging Face hub, or a local data set folder."""

    path: PathText
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = True


@dataclass(frozen=True, config=_STRICT)
class Source:
    """One source of text: local files or a hub set, with a weight."""

    files: Paths = ()
    hub: Hub | None = None
    text: str = "text"  # the field that holds the text
    weight: NotNegative = 1.0  # a document is packed floor(weight) times, plus once more by a seeded coin
    max_mb: Positive | None = None  # stop reading after this much text (MB of UTF-8)
    validation: Annotated[float, Field(ge=0, lt=1)] | None = None  # held out, in the place of the group's share


@dataclass(frozen=True, config=_STRICT)
class HubFlags:
    """``data.hub.path=…`` on the command line: one hub set in the place of the group's sources."""

    path: PathText | None
    name: str | None
    split: str
    revision: str | None
    streaming: bool


@dataclass(frozen=True, config=_STRICT)
class Data:
    """The text, and how it is packed."""

    name: str
    sources: dict[str, Source]
    files: Paths  # one's own files, in the place of the group's sources
    hub: HubFlags
    text: str
    on_bad_row: Literal["skip", "error"]
    validation: Annotated[
        float, Field(ge=0, lt=1)
    ]  # share of the documents that is held out, by a stable hash of the text; 0: train without validation
    seed: int
    workers: Natural  # processes that encode; 0: one per processor
    shard_mb: Positive  # size at which a shard is closed
    packed: PathText | None  # train on this packed folder and pack none

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
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt"] = "auto"
    reasoning: Literal["drop", "keep"] = "drop"
    check: Literal["none", "exact"] = "none"  # exact: the reference answer, character by character
    headings: tuple[str, ...] = ()  # lines that stand in every good answer


@dataclass(frozen=True, config=_STRICT)
class Conversations(Data):
    """The conversations, and how they are packed."""

    sources: dict[str, TalkSource]
    too_long: Literal["cut", "drop"]  # cut: end after the last whole assistant turn that fits, if there is one
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt"] = "auto"  # auto: what a row's fields say
    reasoning: Literal["drop", "keep"] = "drop"  # of assistants, where it stands apart; keep: learnt before the content

    def resolved_sources(self) -> dict[str, TalkSource]:
        """The sources in force: ``chat.files`` and ``chat.hub.path`` replace the group's own."""
        given = {} if self.format == "auto" else {"format": self.format}
        given |= {} if self.reasoning == "drop" else {"reasoning": self.reasoning}
        return {key: TalkSource(**(source.__dict__ | given)) for key, source in super().resolved_sources().items()}


@dataclass(frozen=True, config=_STRICT)
class Sft:
    """What fine-tuning adds to training."""

    tokens: tuple[str, ...]  # control tokens that the vocabulary grows by, where it has not got them
    optimizer: Literal["continue", "fresh"]  # keep the base's moments, or start without
    replay: Annotated[float, Field(ge=0, lt=1)]  # share of each step's windows that are pretraining text
    replay_data: PathText | None  # a packed folder for replay; the base's own otherwise
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
    resume: PathText | None  # a checkpoint of this run to go back to; the newest good one otherwise
    data_dir: PathText
    runs_dir: PathText
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

    branch: PathText | None  # a checkpoint whose weights and moments start this new run
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

    base: PathText  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama
    chat: Conversations
    sft: Sft


@dataclass(frozen=True, config=_STRICT)
class Chat:
    """All of ``python -m stack.chat``."""

    checkpoint: PathText  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama
    prompt: Text | None  # one shot: any text, taken as it is
    prompt_file: PathText | None  # one shot from a file
    system: Text | None  # a system turn in front
    tokens: Count  # the most tokens of an answer
    temperature: NotNegative  # 0: the likeliest token
    top_k: Natural  # 0: all
    top_p: Annotated[float, Field(gt=0, le=1)]
    seed: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["auto", "float32", "bf16"]
    runs_dir: PathText  # where a run is looked for by its name


@dataclass(frozen=True, config=_STRICT)
class Audit:
    """All of ``python -m stack.audit``."""

    checkpoint: PathText  # a run, a checkpoint, or any Hugging Face folder of type Qwen3 or Llama, tied or not
    counts: PathText | None  # a packed folder whose occurrences are shown; those that a checkpoint names otherwise
    unused: tuple[Natural, ...]  # ids of rows that are known to be unused; found in the vocabulary otherwise
    top: Count  # rows that are listed
    json: PathText | None  # a file for all of it; "-" is standard output
    runs_dir: PathText  # where a run is looked for by its name


@dataclass(frozen=True, config=_STRICT)
class Dashboard:
    """All of ``python -m stack.dashboard``."""

    name: str
    file: PathText  # where it is written when not online
    group_by: tuple[str, ...]  # keys of the runs' configuration; runs with equal values are drawn as one
    track: Track


@dataclass(frozen=True, config=_STRICT)
class Report:
    """All of ``python -m stack.report``."""

    runs: Annotated[Paths, Field(min_length=1)]  # names or folders; several stand side by side
    out: PathText | None  # the page
    runs_dir: PathText  # where a run is looked for by its name


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


def entry(
    config_name: str,
    schema: type[Schema],
    job: Callable[[Schema], int],
    *,
    positional: str | None = None,
    compare: Callable[[Sequence[Job]], None] | None = None,
    forgives: bool = True,
) -> Callable[[], None]:
    """The ``main`` of an entry point: compose ``conf/CONFIG_NAME.yaml`` with the command line, then ``job``.

    Args:
        config_name: the entry point is ``stack.CONFIG_NAME``.
        schema: its settings; which of them are paths and texts, that are taken as typed, the types say.
        job: returns the exit code.
        positional: the setting that an argument without ``KEY=`` stands for.
        compare: gets the jobs of a sweep (``-m``) at its end; without it there is no sweep.
        forgives: go on where nobody is there any more to read what is printed; see :mod:`stack.core.streams`.

    A :class:`UserError`, and what Hydra finds wrong with the command line, print one message and exit with 2; any other
    exception keeps its traceback and exits with 1. A sweep attempts all of its jobs and exits as the first one that
    failed; a signal ends it, with its own code.
    """
    door = Door(config_name, schema, positional)

    def at_home(config: Schema) -> int:
        with home():
            return job(config)

    def main() -> None:
        with forgiving() if forgives else nullcontext():
            code = start()
        sys.exit(code)

    def start() -> int:
        done: list[Job] = []
        codes: list[int] = []

        def run(values: DictConfig) -> None:
            codes.append(1)  # whatever happens
            if not given.several:
                codes[-1] = _exit_code(lambda: at_home(typed(values, schema)))
                return
            one = _job_of(values, given.swept, done)
            with sweep.apart(one.title):
                codes[-1] = _exit_code(lambda: at_home(typed(_renamed(values, one.name), schema)))
            done.append(dataclasses.replace(one, code=codes[-1]))
            if codes[-1] > 128 or (codes[-1] and int(os.environ.get("WORLD_SIZE", "1")) > 1):
                raise SystemExit(codes[-1])  # ranks whose jobs end differently would wait for each other

        try:
            given = arguments.read(sys.argv[1:], door)
            if given.several and compare is None:
                raise UserError(f"stack.{config_name} does one thing at a time; leave -m out")
        except UserError as error:
            _tell(error)
            return 2
        _given[:] = [given]
        try:
            with _composed(given):
                hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(run)()
        except SystemExit as stop:
            codes[-1:] = [int(stop.code or 0) if codes or not stop.code else 2]
        except KeyboardInterrupt:
            _say_interrupted()
            codes.append(130)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            _tell(UserError(arguments.explained(error, door)))
            codes.append(2)
        if done and compare is not None and os.environ.get("RANK", "0") == "0":
            _exit_code(lambda: compare(done) or 0)
        stopped = codes[-1] if codes and codes[-1] > 128 else 0
        return stopped or next((code for code in codes if code), 0)

    return main


def _exit_code(work: Callable[[], int]) -> int:
    """What ``work`` returns, or the exit code of what it raises, which is told."""
    try:
        return work()
    except UserError as error:
        _tell(error)
        return 2
    except LostError as error:
        print(f"rank {os.environ.get('RANK', '0')}: stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say_interrupted()
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            print(f"error: {error}; make room, or give other folders with data_dir and runs_dir", file=sys.stderr)
            return 2
        traceback.print_exc()  # Hydra would cut it short
        return 1


def _tell(error: UserError) -> None:
    if not isinstance(error, EchoError):
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"rank {rank}: error: {error}", file=sys.stderr)


def _say_interrupted() -> None:
    print("interrupted; the same command goes on from what is finished", file=sys.stderr)


@contextmanager
def _composed(given: Given) -> Iterator[None]:
    """Around Hydra: it reads what we have read, raises what it finds wrong, and leaves no folder of its own."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with ExitStack() as stack:
        scratch = []
        if given.several:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            scratch = [f"hydra.sweep.dir={arguments.quoted(folder)}", "hydra.sweep.subdir=."]
        sys.argv = [before[0], *given.hydra, *(one for one in scratch if not _has(given.hydra, one))]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = before
            os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)


def _has(given: list[str], override: str) -> bool:
    key = override.partition("=")[0]
    return any(argument.partition("=")[0] == key for argument in given)


def _job_of(values: DictConfig, swept: Sequence[str], done: Sequence[Job]) -> Job:
    """The job of a sweep that begins now, after those that are done; rank 0 says so."""
    told = HydraConfig.get()
    keys = [*swept, *(told.sweeper.get("params") or {})]
    differs = sweep.differences(OmegaConf.to_container(told.overrides.task), keys)
    base, runs_dir = str(values.get("name", "")), os.path.expanduser(str(values.get("runs_dir", "")))
    title = done[0].title if done else sweep.title_of(base, differs)
    if os.environ.get("RANK", "0") == "0":
        shown = ", ".join(f"{key}={value}" for key, value in differs.items())
        print(f"job {len(done) + 1}: {shown or 'nothing differs'}", flush=True)
    return Job(sweep.name_of(base, differs), title, differs, runs_dir, 1)


def _renamed(values: DictConfig, name: str) -> DictConfig:
    if "name" in values:
        values.name = name
    return values


def _as_typed(override: str) -> str:
    """What a person typed for what Hydra has of a setting: it writes the settings of a sweep's jobs anew."""
    key = override.partition("=")[0]
    for read in _given:
        typed = [word for ours, word in read.typed.items() if ours == override or ours.startswith(f"{key}=")]
        if typed and key.lstrip("+") not in read.swept:
            return typed[-1]
    return override.removeprefix("++")


_given: list[Given] = []  # the command line of this process


def command(name: str) -> str | None:
    """The command line that started this process, to be given again; None where it is none of this program's.

    ``resume=`` is left out: it went back once, and going on does not. Of a job of a sweep it is the command of this job
    alone, whose run is ``name``.
    """
    if not HydraConfig.initialized():
        return None
    told = HydraConfig.get()
    given = [_as_typed(text) for text in OmegaConf.to_container(told.overrides.task)]
    if told.mode == RunMode.MULTIRUN:
        given = [*(text for text in given if not text.startswith("name=")), f"name={name}"]
    python = Path(sys.executable)
    here = python.parent.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else Path()
    start = [str(here / "python")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = (int(os.environ[key]) for key in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        # Its own address is looked up by name otherwise, for minutes where the name of the host is nowhere known.
        nodes = [f"--nnodes={world // local}"] if world > local else ["--local-addr=127.0.0.1"]
        start = [str(here / "torchrun"), *nodes, f"--nproc-per-node={local}"]
    given = [text for text in given if not text.startswith("resume=")]
    return shlex.join([*start, "-m", f"stack.{told.job.config_name}", *given])


def is_given(key: str) -> bool:
    """Whether the command line sets ``key``, so that its value is no default; a sweep gives its jobs their names."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and key == "name":
        return True
    return any(ours.partition("=")[0].lstrip("+") == key for read in _given for ours in read.typed)
