"""The settings: frozen dataclasses, one a group, and what each of them means."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from stack.config.kinds import Before, MayChange, Paths, PathText, Text

# A name may look like a number: name=2024.
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

MIN_VOCABULARY = 320  # 256 bytes and two control tokens, up to a multiple of 64
LENGTHS = ("steps", "tokens", "minutes", "epochs")  # of train; exactly one is given
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# How conversations are written (auto: what the fields of a row say), and what becomes of reasoning that stands apart.
Format = Annotated[Literal["auto", "messages", "sharegpt", "alpaca", "prompt"], Before("auto")]
Reasoning = Annotated[Literal["drop", "keep"], Before("drop")]
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
    # Held out, in the place of the group's share.
    validation: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, Before(None)] = None


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
    # Share of the documents that is held out, by a stable hash of the text; 0: train without validation.
    validation: Annotated[float, Field(ge=0, lt=1)]
    seed: int
    workers: MayChange[Natural]  # processes that encode; 0: one per processor
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
class ConversationSource(Source):
    """One source of conversations, and what a good answer to one of them is."""

    text: str = "messages"  # the field that holds the list of messages
    format: Format = "auto"
    reasoning: Reasoning = "drop"
    check: Literal["none", "exact"] = "none"  # exact: the reference answer, character by character
    headings: tuple[str, ...] = ()  # lines that stand in every good answer


@dataclass(frozen=True, config=_STRICT)
class Conversations(Data):
    """The conversations, and how they are packed."""

    sources: dict[str, ConversationSource]
    too_long: Literal["cut", "drop"]  # cut: end after the last whole assistant turn that fits, if there is one
    format: Format = "auto"
    reasoning: Reasoning = "drop"

    def resolved_sources(self) -> dict[str, ConversationSource]:
        """The sources in force: ``chat.files`` and ``chat.hub.path`` replace the group's own."""
        given = {} if self.format == "auto" else {"format": self.format}
        given |= {} if self.reasoning == "drop" else {"reasoning": self.reasoning}
        return {
            key: ConversationSource(**(source.__dict__ | given)) for key, source in super().resolved_sources().items()
        }


@dataclass(frozen=True, config=_STRICT)
class Sft:
    """What fine-tuning adds to training."""

    tokens: tuple[str, ...]  # control tokens that the vocabulary grows by, where it has not got them
    optimizer: Literal["continue", "fresh"]  # keep the base's moments, or start without
    replay: Annotated[float, Field(ge=0, lt=1)]  # share of each step's windows that are pretraining text
    replay_data: PathText | None  # a packed folder for replay; the base's own otherwise
    show: MayChange[Natural]  # print so many packed conversations with what is supervised coloured, and stop
    answers: MayChange[Natural]  # held-out conversations of each source, answered and checked at every validation
    answer_tokens: MayChange[Count]  # the most tokens of such an answer


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

    # Of LENGTHS one is given; a run may go on to a later end.
    steps: MayChange[Count | None]
    tokens: MayChange[Positive | None]
    minutes: MayChange[Positive | None]
    epochs: MayChange[Positive | None]
    window: Annotated[int, Field(ge=2)]  # tokens
    global_batch: Count  # windows in a step, over all ranks
    micro_batch: MayChange[Count]  # the most windows in one forward pass of one rank
    clip: NotNegative  # largest gradient norm; 0: no clipping
    z_loss: NotNegative
    loss: Literal["full", "checkpoint", "fused"]
    chunk_tokens: Count
    max_bad_steps: MayChange[Count]

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

    rows_every: Annotated[Natural, Before(0)]  # steps between two snapshots of the table, one more at the end; 0: none


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
    # Of wandb; metrics.jsonl is always written.
    mode: Annotated[Literal["auto", "online", "offline", "disabled"], Before("disabled")]
    project: str
    entity: str | None  # user or team on the server; the key's own otherwise
    stall_minutes: Annotated[NotNegative, Before(0.0)]  # without a step, before an alert; 0: never
    report: Annotated[bool, Before(False)]  # write audit.json and report.html into runs/NAME at the end


@dataclass(frozen=True, config=_STRICT)
class Run:
    """What pretraining and fine-tuning share."""

    name: MayChange[str]  # a folder may be renamed
    seed: int
    device: MayChange[Literal["auto", "cpu", "cuda", "mps"]]
    precision: Literal["auto", "float32", "bf16"]
    compile: MayChange[Literal["auto", "on", "off"]]
    resume: MayChange[PathText | None]  # a checkpoint of this run to go back to; the newest good one otherwise
    data_dir: MayChange[PathText]
    runs_dir: MayChange[PathText]
    train: Train
    optim: Optim
    schedule: Schedule
    evaluate: MayChange[Evaluate]
    sample: MayChange[Sample]
    diagnostics: MayChange[Diagnostics]
    checkpoint: MayChange[Checkpoint]
    parallel: MayChange[Parallel]
    track: MayChange[Track]


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


def plain(config: Any) -> dict[str, Any]:
    """The configuration as nested plain values, for YAML, JSON and digests."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")
