"""Small runs for tests: a corpus, its settings, and ``python -m stack.train`` in real processes that start fast.

A process is forked from a server that has imported the program but run nothing of it, so it starts in a moment and
dies like any other.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from stack import job
from stack import train as entry
from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import Config
from stack.core import machine
from stack.core.ranks import Ranks
from stack.data.batches import Batch
from stack.evaluation.hooks import Validate
from stack.evaluation.validation import Validation
from stack.model.attention import Segments
from stack.model.decoder import Decoder
from stack.observe.table import TableSnapshots
from stack.tracking import wandb_run
from stack.tracking.metrics import MEASURED
from stack.tracking.terminal import Display
from stack.training.hooks import Hook, Moment
from stack.training.length import DryStep, dry_step
from stack.training.prepare import Materials, prepare_data
from stack.training.run_folder import FRESH, ResumePoint
from stack.training.state import State, StepResult
from stack.training.trainer import Step, micro_batches

WORDS = ("the", "cat", "dog", "house", "ran", "red", "sun", "of", "and", "to", "water", "stone", "tree", "bird", "sang")
SETTINGS = (
    "name=tiny",
    "device=cpu",
    "precision=float32",  # auto computes in bfloat16 where the processor is fast at it, and laws are held to 1e-6
    "compile=off",
    "data=none",
    "data.validation=0.3",
    "data.workers=1",
    "tokenizer.vocab_size=320",
    "model.layers=2",
    "model.d=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.head_dim=16",
    "model.ffn=64",
    "model.context=64",
    "model.zero_init=false",
    "train.window=32",
    "train.global_batch=3",
    "train.micro_batch=1",
    "train.steps=6",
    "schedule.warmup=2",
    "checkpoint.every=0",
    "diagnostics.rows_every=3",
    "sample.prompts=[the cat]",
    "sample.tokens=4",
    "track.mode=disabled",
    "track.report=false",
)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes: threads cost more than they bring at this size
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["stack.train", "stack.sft", "torch._dynamo"])  # the optimizers import the latter


def corpus(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Writes documents of 3 to 60 words."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 60))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def settings(root: Path, *more: str) -> list[str]:
    """The command line of a small run below ``root``; ``more`` overrides."""
    text = root / "corpus.jsonl"
    if not text.exists():
        corpus(text)
    own = [*SETTINGS, f"data.files=[{text}]", f"data_dir={root}/data", f"runs_dir={root}/runs"]
    new = [argument.split("=", 1)[0] for argument in more]
    return [argument for argument in own if argument.split("=", 1)[0] not in new] + list(more)


def configure(*arguments: str) -> Config:
    """The typed configuration of a command line."""
    with initialize_config_dir(CONF, version_base="1.3"):
        return typed(compose("train", overrides=list(arguments)))


class Bench:
    """A run in pieces, before its first step: what a test takes steps with and looks into.

    Its folder is not made, and what is learnt from needs no text where ``made`` is given.
    """

    def __init__(self, c: Config, ranks: Ranks | None = None, made: Materials | None = None):
        self.config, self.ranks, self.display = c, ranks or Ranks(), Display(False)
        if made is None:
            tokenizer, packed = prepare_data(c, self.ranks, self.display.show)
            made = entry.materials_of(c, tokenizer, packed)
        self.made, self.train = made, made.train
        self.job = job.Job(c, machine.choose_device(c.device), self.ranks, self.display, FRESH)
        self.folder = self.job.folder
        self.model = Decoder(made.model, made.tokenizer.vocab_size, seed=c.seed).to(self.job.device)
        self.take = Step(c, self.model, self.ranks)
        self.optimizers, self.loss, self.wrapped = self.take.optimizers, self.take.loss, self.take.wrapped
        self.state = State()
        every, end = c.diagnostics.rows_every, c.train.steps or 0
        self.rows = TableSnapshots(self.model.table, self.optimizers, made.classes, self.ranks, every, end)

    def step(self, number: int, batches: list[Batch], factor: float) -> StepResult:
        """One step, looked at where that is due."""
        self.result = self.take(number, batches, factor, [self.rows])
        return self.result

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's of a step."""
        return micro_batches(self.train, self.train.windows_of(step), self.take)

    def moment(self, result: StepResult, batches: Sequence[Batch] = ()) -> Moment:
        """The moment after a step, which is counted."""
        self.state.count(result)
        return Moment(self.state, 100, result, list(batches), 1.0, 1.0, 0.0, 0)

    def look(self, result: StepResult, batches: Sequence[Batch]) -> dict[str, Any]:
        """What the observer of the table has found of a step, where it was due."""
        return self.rows.after_step(self.moment(result, batches))

    def dry_step(self) -> DryStep:
        """What the run does before its first step."""
        return dry_step(self.take, self.train, lambda batch: job.measured(self.take, batch))

    def validation(self) -> Validation:
        """One pass over what is held out."""
        m, shown = self.made, self.display.show
        return Validate(self.take, m.held_out, m.num_bytes, m.classes, dict, shown, shown).validation()

    def begin(self, start: ResumePoint = FRESH) -> job.Begun:
        """All that comes before the first step, in the run's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.job.start = start
        return job.begin(self.job, self.made)


def trainer(c: Config, ranks: Ranks | None = None) -> Bench:
    """A run before its first step."""
    return Bench(c, ranks)


def packed(root: Path) -> Path:
    """``root`` with a corpus and its packed data."""
    corpus(root / "corpus.jsonl", documents=20)
    trainer(configure(*settings(root)))
    return root


def script(name: str) -> ModuleType:
    """``scripts/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Spoil(Hook):
    """Has the last norm give something else while the given steps, and what comes behind them, go on."""

    def __init__(self, model: Decoder, output: Callable[[torch.Tensor], torch.Tensor], steps: Sequence[int]):
        self.model, self.output, self.steps, self.handles = model, output, steps, []

    def before_step(self, step: int) -> None:
        while self.handles:
            self.handles.pop().remove()
        if step in self.steps:
            norm = self.model.model.norm
            self.handles.append(norm.register_forward_hook(lambda module, inputs, found: self.output(found)))


@contextmanager
def spoiled(output: Callable[[torch.Tensor], torch.Tensor], steps: Sequence[int]) -> Iterator[None]:
    """Runs of this process have a :class:`Spoil` among their hooks."""
    own = job.hooks_of

    def hooks_of(started: job.Job, made: Materials, begun: job.Begun, *more: Any) -> job.Hooks:
        found = own(started, made, begun, *more)
        return replace(found, all=[Spoil(begun.step.model, output, steps), *found.all])

    job.hooks_of = hooks_of
    try:
        yield
    finally:
        job.hooks_of = own


class Job:
    """A function in a process of its own; standard output and error go into a file."""

    def __init__(self, work: Callable[..., object], *args: object, log: Path, env: Mapping[str, str] | None = None):
        self.log = log
        self.process = SERVER.Process(target=_in_child, args=(work, args, str(log), dict(env or {})))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs; minus the signal that ended it."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> int:
        """Its exit code, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s:\n{self.output()}")
        return self.process.exitcode

    def output(self) -> str:
        """What it has written."""
        return self.log.read_text() if self.log.exists() else ""


def _in_child(work: Callable[..., object], args: tuple[object, ...], log: str, env: dict[str, str]) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored …
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # … and what runs under nohup this one
    work(*args)


def command(arguments: list[str], module: str = "stack.train") -> None:
    """``python -m stack.train ARGUMENTS``, in a :class:`Job`."""
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def train(root: Path, *more: str, env: Mapping[str, str] | None = None, log: str = "log") -> Job:
    """Starts the command of :func:`settings`."""
    return Job(command, settings(root, *more), log=root / log, env=env)


CHAT = (
    "name=talk",
    "device=cpu",
    "precision=float32",
    "compile=off",
    "chat=none",
    "chat.validation=0.3",
    "chat.workers=1",
    "train.window=48",
    "train.global_batch=3",
    "train.micro_batch=1",
    "train.steps=12",
    "checkpoint.every=4",
    "diagnostics.rows_every=3",
    "evaluate.every=6",
    "sample.prompts=[say the cat]",
    "sample.tokens=4",
    "sft.optimizer=continue",
    "sft.answers=3",
    "sft.answer_tokens=6",
    "track.mode=disabled",
    "track.report=false",
)


def conversations(path: Path, *, count: int = 40, seed: int = 0) -> Path:
    """Writes conversations of one or two turns; the answer is a word of the question."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for word in draw.sample(WORDS, draw.randint(1, 2)):
                messages += [
                    {"role": "user", "content": f"say the {word}"},
                    {"role": "assistant", "content": word},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def sft_settings(root: Path, *more: str) -> list[str]:
    """The command line of a small fine-tuning of ``root/runs/tiny``; ``more`` overrides."""
    text = root / "talk.jsonl"
    if not text.exists():
        conversations(text)
    own = [*CHAT, f"base={root}/runs/tiny", f"chat.files=[{text}]", f"data_dir={root}/data", f"runs_dir={root}/runs"]
    new = [argument.split("=", 1)[0] for argument in more]
    return [argument for argument in own if argument.split("=", 1)[0] not in new] + list(more)


def sft(root: Path, *more: str, env: Mapping[str, str] | None = None, log: str = "log") -> Job:
    """Starts the command of :func:`sft_settings`."""
    return Job(command, sft_settings(root, *more), "stack.sft", log=root / log, env=env)


def ranks_of(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives to each of ``count`` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    return [common | {"MASTER_PORT": str(port), "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]


def until(holds: Callable[[], bool], timeout: float = 60) -> None:
    """Waits until something holds."""
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


def rows(run: Path) -> list[dict]:
    """The rows of ``metrics.jsonl`` without what is measured."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)} for line in lines]


def run(c: Config) -> int:
    """``stack.train`` in this process."""
    return entry.run(c)


def segments(batch: Batch) -> Segments:
    """Of a batch on the CPU."""
    return Segments(batch.lengths, batch.ids.shape[1], torch.device("cpu"))


def together(count: int, work: Callable[..., object], *args: object, folder: Path) -> list[Job]:
    """``work`` on every rank, to the end."""
    jobs = [
        Job(work, *args, log=folder / f"rank{i}.log", env=environment) for i, environment in enumerate(ranks_of(count))
    ]
    for one in jobs:
        one.wait()
    return jobs


def without_a_key(root: str, module: str, arguments: list[str], *, init_s: float | None = None) -> None:
    """An entry point on a machine where nobody has logged in; ``init_s``: how long a host has to answer."""
    given = {name: value for name in ("WANDB_API_KEY", "WANDB_BASE_URL") if (value := os.environ.get(f"OUR_{name}"))}
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ |= given | {"NETRC": f"{root}/none", "WANDB_CONFIG_DIR": f"{root}/none"}
    if init_s is not None:
        wandb_run.INIT_S = init_s
    command(arguments, module)
