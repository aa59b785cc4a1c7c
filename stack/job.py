"""A run from its start to its end: what the doors to training share.

A door prepares the materials (:class:`stack.training.prepare.Materials`); all else is here, the hooks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stack import checkpoint
from stack.config.command import command
from stack.config.schema import Model, Run
from stack.core import machine
from stack.core.errors import UserError
from stack.core.files import write_json
from stack.core.ranks import SHARED, Ranks, ranks
from stack.data.batches import Batch
from stack.evaluation.answers import Question
from stack.evaluation.hooks import Sample, Validate, answered
from stack.evaluation.samples import continuations
from stack.model.decoder import Decoder
from stack.observe import audit, memory
from stack.observe.page import page
from stack.observe.table import TableSnapshots
from stack.tracking.hooks import Progress, Write
from stack.tracking.metrics import Metrics
from stack.tracking.terminal import Display
from stack.tracking.tracker import Tracker
from stack.tracking.wandb_mode import choose_mode
from stack.tracking.wandb_run import WandbRun
from stack.training import run_folder
from stack.training.hooks import BadSteps, Every, Hook, Save
from stack.training.length import dry_step, num_steps
from stack.training.prepare import Materials
from stack.training.restore import check_belongs, restore, state_of
from stack.training.run_folder import ResumePoint
from stack.training.signals import Signals
from stack.training.state import State
from stack.training.trainer import Step, Trainer, to_device


@dataclass
class Job:
    """A run that somebody has started: its folder, who takes part, and what it goes on from."""

    config: Run
    device: str
    ranks: Ranks
    display: Display
    start: ResumePoint
    folder: Path = field(init=False)  # runs/NAME

    def __post_init__(self) -> None:
        self.folder = run_folder.folder_of(self.config)

    def finished(self) -> bool:
        """Whether nothing is left to do, which is told."""
        if self.start.finished:
            where = f"step {self.start.step} of {self.start.steps}; checkpoint: {self.start.checkpoint}"
            self.display.show(f"finished already: {where}")
        return self.start.finished

    def choose_mode(self) -> str:
        """The mode of wandb; asked before any work, so that what is wrong with it is told at once."""
        return self.ranks.on_main(lambda: choose_mode(self.config.track, self.folder, self.display.show))

    def check_memory(self, model: Model, num_rows: int) -> None:
        """UserError where a step does not fit into the memory that is free."""
        c, show = self.config, self.display.show
        self.ranks.on_all(lambda: memory.check_memory(model, c, num_rows, self.device, self.ranks, show))

    def train(self, made: Materials, mode: str, questions: Sequence[Question] = ()) -> int:
        """Trains to the end; returns the exit code: 0, or 128 + the signal that stopped it.

        Args:
            made: what the run learns from.
            mode: of wandb, as :meth:`choose_mode` gave it.
            questions: held-out conversations that are answered at every validation.
        """
        begun, signals = begin(self, made), Signals()
        state, tracker, code, why = State(begun.start_step), None, 1, "failed"
        try:
            with signals.heard():
                tracker = self.tracker(begun, mode) if self.ranks.main else None
                hooks = hooks_of(self, made, begun, tracker, questions)
                state = state_of(begun.saved, hooks.all, f"{self.start.checkpoint}/{checkpoint.STATE}")
                self.display.start(state.step, begun.steps)
                code = Trainer(begun.step, made.train, state, begun.steps, hooks.all, signals).run()
            if code:
                why = f"stopped by signal {code - 128}"
                self.display.show(
                    f"{why} after step {state.step} of {begun.steps}, saved; the same command goes on from here"
                )
            else:
                why = "finished"
                newest = checkpoint.folder_of(self.folder / "checkpoints", state.step)
                hooks.progress.summary(state, hooks.quality(), begun.planned, newest)
            if self.ranks.main and self.config.track.report:
                self._report(state.step)
            return code
        except BaseException as error:
            why = f"failed: {error}"
            raise
        finally:
            self.display.stop()
            if tracker is not None:
                text = f"{self.config.name} {why} at step {state.step} of {begun.steps}"
                tracker.alert(why.split(":")[0], text, level="ERROR" if code == 1 else "INFO")
                tracker.close(code)

    def tracker(self, begun: Begun, mode: str) -> Tracker:
        """The record of this run; growth is its first row, where there was any."""
        offset = begun.saved.get("metrics_offset", 0)
        metrics = Metrics(self.folder, offset)
        wandb = None
        if mode != "disabled":
            wandb = WandbRun(self.folder, mode, self.config, begun.resolved, offset, self.display.show)
        tracker = Tracker(metrics, wandb)
        growth = begun.resolved["identity"].get("growth")
        if offset == 0 and growth is not None:
            facts = {key: value for key, value in growth.items() if isinstance(value, int | float)} | growth["counts"]
            at = {"step": begun.saved.get("step", 0), "tokens": begun.saved.get("tokens", 0)}
            tracker.write(at | {f"growth/{key}": value for key, value in facts.items()})
        return tracker

    def _report(self, step: int) -> None:
        """An audit of the rows, and the page. Whatever goes wrong with either, the run is saved and a line says so."""
        show = self.display.show
        try:
            found = audit.audit(str(checkpoint.folder_of(self.folder / "checkpoints", step)), known=False, show=show)
            write_json(self.folder / audit.NAME, found)
        except Exception as error:
            show(f"no audit: {error}")
        try:
            show(f"page: {page.write([self.folder], self.folder / page.NAME)}")
        except Exception as error:
            show(f"no page: {error}")


@contextmanager
def started(config: Run, branch: str | None = None) -> Iterator[Job]:
    """The job of a configuration; nobody else works in its folder meanwhile."""
    device = machine.choose_device(config.device)
    with ranks(config.parallel.kind, device) as own, run_folder.locked(run_folder.folder_of(config), own):
        display = Display(own.main)
        yield Job(config, device, own, display, resume_point(config, own, display, branch))


def resume_point(config: Run, own: Ranks, display: Display, branch: str | None = None) -> ResumePoint:
    """What the run goes on from; the same on every rank."""
    folder = run_folder.folder_of(config)
    return ResumePoint(**own.on_main(lambda: asdict(run_folder.start_of(folder, config, display.show, branch))))


# ---------------------------------------------------------------- before the first step


@dataclass(frozen=True)
class Begun:
    """A run before its first step: compiled, measured, its end fixed, weights and moments in place."""

    step: Step
    steps: int  # the end
    start_step: int
    saved: dict[str, Any]  # what a checkpoint holds beside weights and moments; empty for a new run
    resolved: dict[str, Any]  # what is fixed from the settings, with every digest
    planned: int  # bytes of a step


def begin(job: Job, made: Materials) -> Begun:
    """Everything before the first step: compiler, one dry step, length, weights and moments, ``config.yaml``."""
    c, start, own, show = job.config, job.start, job.ranks, job.display.show
    model = Decoder(made.model, made.tokenizer.vocab_size, seed=c.seed).to(job.device)
    step = Step(c, model, own)
    own.on_all(lambda: check_belongs(start, made.tokenizer, made.identity))
    show(_described(c, model))
    own.on_all(lambda: _compile(c.compile, model, job.device, show))
    dry = dry_step(step, made.train, lambda batch: measured(step, batch))
    steps = start.steps or own.on_main(lambda: num_steps(c.train, made.train, dry.seconds, show))
    saved = own.on_all(lambda: restore(start, steps, step, show), SHARED)
    windows = c.train.largest_forward(own.world)
    plan = memory.plan_memory(made.model, c, made.tokenizer.vocab_size, job.device, windows)
    resolved = {
        "steps": steps,
        "device": job.device,
        "dtype": str(step.dtype),
        "identity": made.identity,
        "memory": {"planned": asdict(plan) | {"peak": plan.peak}, "measured": dry.measured},
        "command": command(c.name),
    }
    own.on_main(lambda: run_folder.begin(job.folder, c, start, resolved, show))
    return Begun(step, steps, start.step, saved, resolved, plan.peak)


def measured(step: Step, batch: Batch) -> dict[str, int]:
    """Bytes by the parts of the memory plan that can be measured apart, with one micro-batch."""
    with step.autocast():
        return memory.measure(step.model, step.optimizers.moments(), to_device(batch, step.device))


def _described(c: Run, model: Decoder) -> str:
    """One line about the shape of the run."""
    m, t = model.config, c.train
    return (
        f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {m.layers} layers × {m.d}, "
        f"{m.heads}/{m.kv_heads} heads × {m.head_dim}, SwiGLU {m.ffn}; "
        f"{t.global_batch} windows × {t.window} tokens a step; seed {c.seed}"
    )


def _compile(wanted: str, model: Decoder, device: str, show: Callable[[str], None]) -> None:
    """Compiles the model where that is wanted and works."""
    if wanted == "off":
        return
    why = machine.compiler_works(device)
    if why and wanted == "on":
        raise UserError(f"compile=on, but nothing can be compiled here: {why}; use compile=auto or compile=off")
    if why:
        show(f"not compiled: {why}")
    else:
        model.compile_blocks()


# ---------------------------------------------------------------- around every step


@dataclass(frozen=True)
class Hooks:
    """The hooks of a run, and those of them that are asked at its end."""

    all: Sequence[Hook]  # in the order in which they are called
    progress: Progress
    validate: Validate

    def quality(self) -> tuple[str, float | None]:
        """The figure that says how good the model is, by name; None where it is not finite."""
        losses = self.progress.losses
        if not self.validate.held_out.num_windows and losses:
            return "train loss", sum(losses) / len(losses)
        return self.validate.quality()


def hooks_of(
    job: Job, made: Materials, begun: Begun, tracker: Tracker | None, questions: Sequence[Question] = ()
) -> Hooks:
    """What happens around every step of a run, in this order."""
    c, step, own, display = job.config, begun.step, job.ranks, job.display
    checkpoints = job.folder / "checkpoints"

    def ask() -> dict[str, float]:
        return answered(step, made.tokenizer, questions, c, display.show) if questions else {}

    def alert(title: str, text: str) -> None:
        if tracker is not None:
            tracker.alert(title, f"{c.name}: {text}")

    def contents() -> dict[str, Any]:
        return {
            "model_config": made.model,
            "tokenizer": made.tokenizer,
            "weights": step.model.state_dict(),
            "moments": step.optimizers.moments(),
            "identity": made.identity,
        }

    validate = Validate(step, made.held_out, made.num_bytes, made.classes, ask, display.show, display.wait)
    progress = Progress(step, display, tracker, validate.described)
    looking = [
        TableSnapshots(step.model.table, step.optimizers, made.classes, own, c.diagnostics.rows_every, begun.steps),
        validate,
        Sample(step, lambda: continuations(step.model, made.tokenizer, c.sample, c.seed), display.show),
        Write(tracker),
    ]
    bad = BadSteps(c.train.max_bad_steps, alert, lambda: checkpoint.newest(checkpoints, display.show, owner=False))
    save = Save(Every(c.checkpoint.every, stopping=True), c.checkpoint.keep, checkpoints, own, contents, looking)
    return Hooks([bad, progress, *looking, save], progress, validate)
