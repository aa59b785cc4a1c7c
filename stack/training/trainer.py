"""One optimizer step, and the loop around it. Pretraining and fine-tuning share both.

The loss of a step is the sum of the token losses of the whole global batch divided by its number of supervised
tokens, counted over all ranks before the first forward pass. So neither accumulation nor ranks nor padding change
the number, the gradient or its norm.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stack.checkpoint import manager as checkpoint
from stack.config.schema import Conversations, Run, UserError, command
from stack.core import machine
from stack.core.files import write_json
from stack.core.ranks import SHARED, Ranks
from stack.data.batches import Batch, Batches, Windows
from stack.evaluation import answers
from stack.evaluation.answers import Question
from stack.evaluation.generate import Sampling, generate
from stack.evaluation.validation import Validation, to_device, validate
from stack.model.decoder import Decoder, Loss
from stack.observe import memory
from stack.observe import rows_audit as audit
from stack.observe.page import page
from stack.observe.table import Rows
from stack.parallel import wrap as parallel
from stack.text import conversation
from stack.text.tokenizer import Tokenizer
from stack.tracking.metrics import Display, Metrics, Tracker, duration
from stack.tracking.wandb_run import WandbRun
from stack.training import run_folder
from stack.training.optim import Optimizers, lr_factor

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # that stop a run; SIGHUP: its terminal has gone
LATEST = 20  # steps whose mean training loss stands for the run where nothing is held out; the page's number
BAD_STREAK = 3  # steps in a row that are not finite, before an alert


@dataclass
class State:
    """Where a run stands; all that a checkpoint holds beside weights and moments."""

    step: int = 0  # optimizer steps behind it, skipped ones counted
    tokens: int = 0  # supervised tokens
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    last: dict[str, float] = field(default_factory=dict)  # the latest validation
    metrics_offset: int = 0
    seen: str = ""  # the rows that were an input so far, a bit each in hex; see diagnostics/rows.py

    @classmethod
    def of(cls, loaded: checkpoint.Loaded) -> State:
        """The state of a checkpoint. What an older version has not saved starts as above.

        UserError for what this version does not know: it would be lost in the next checkpoint.
        """
        unknown = sorted(loaded.state.keys() - {entry.name for entry in fields(cls)})
        if unknown:
            raise UserError(
                f"{loaded.folder / checkpoint.STATE} holds {', '.join(unknown)}, which this version does not know; a "
                "newer version of this program saved it: go on with that one"
            )
        return cls(**loaded.state)


@dataclass(frozen=True)
class StepResult:
    """What one step found."""

    loss: float  # nats per supervised token over the global batch, with the z-loss
    norm: float  # of the gradient before clipping
    tokens: int
    taken: bool


@dataclass(frozen=True)
class Split:
    """What is learnt and what it is measured on."""

    train: Batches
    validation: Windows  # none where nothing is held out
    validation_bytes: dict[str, int] | None  # of its text by source, for bits per byte
    questions: tuple[Question, ...] = ()  # held-out conversations to answer at every validation
    answer_tokens: int = 0  # the most tokens of such an answer
    chat: Conversations | None = None  # how they are judged
    classes: np.ndarray | None = None  # of every row; see diagnostics/rows.py


class Trainer:
    """Trains ``model`` in a run's folder.

    Args:
        config: everything.
        model: the decoder on its device; its weights are replaced by those of a checkpoint, where there is one.
        split: the data.
        tokenizer: saved with every checkpoint.
        identity: digests of what the run is made from, saved with every checkpoint.
        ranks: this process among others.
        display: the terminal.
    """

    def __init__(
        self,
        config: Run,
        model: Decoder,
        split: Split,
        tokenizer: Tokenizer,
        identity: dict[str, Any],
        ranks: Ranks,
        display: Display,
    ):
        self.config, self.model, self.split = config, model, split
        self.tokenizer, self.identity, self.ranks, self.display = tokenizer, identity, ranks, display
        self.device = model.table.weight.device.type
        self.dtype = machine.choose_precision(config.precision, self.device)
        self.folder = run_folder.folder_of(config)
        self.loss = Loss(config.train.loss, config.train.chunk_tokens, config.train.z_loss)
        ns_dtype = torch.bfloat16 if machine.fast_bf16(self.device) else torch.float32
        self.optimizers = Optimizers(model, config.optim, ns_dtype=ns_dtype, ranks=ranks)
        self.rows = Rows(model.table, self.optimizers, split.classes, ranks, config.diagnostics.rows_every)
        self.wrapped = parallel.wrap(model, ranks)
        self.state = State()
        self.steps = 0  # the end; fixed by prepare()
        self.resolved: dict[str, Any] = {}  # what is fixed from the settings, with every digest; by prepare()
        self.metrics: Tracker | None = None  # rank 0's
        self.signal = 0
        self.losses: deque[float] = deque(maxlen=LATEST)  # of the latest steps that were taken
        rows, windows = len(model.table.weight), config.train.largest_forward(ranks.world)
        self.plan = memory.plan_memory(model.config, config, rows, self.device, windows)
        self.measured: dict[str, int] = {}  # parts of the plan, by the dry step
        self.memory = machine.memory_figures(self.device)  # after the latest step, before answers

    # ------------------------------------------------------------------------------------------------ one step

    def step(self, number: int, micro_batches: list[Batch], factor: float) -> StepResult:
        """One optimizer step over the micro-batches of this rank.

        A step without a supervised token, or with a loss or norm that is not finite, changes neither weights nor
        moments.
        """
        count = int(self.ranks.sum(sum(batch.num_targets for batch in micro_batches))[0])
        if count == 0:
            return StepResult(0.0, 0.0, 0, taken=False)
        losses = []
        self.rows.watch(number, self.steps)
        for i, batch in enumerate(micro_batches):
            with parallel.unsynchronized(self.wrapped, last=i == len(micro_batches) - 1):
                with self.autocast():
                    total = self.wrapped(*to_device(batch, self.device), self.loss)
                # DDP averages over ranks; the sum over ranks divided by the count of all of them is wanted.
                (total * (self.ranks.world / count)).backward()
            losses.append(total.detach())
        loss = self.ranks.sum(torch.stack(losses).cpu().double().sum().item())[0] / count
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total_norm = get_total_norm([p.grad for p in parameters])
        norm = float(total_norm)
        taken = math.isfinite(loss) and math.isfinite(norm)
        self.rows.before_update()
        if taken:
            if self.config.train.clip:
                clip_grads_with_norm_(parameters, self.config.train.clip, total_norm)
            self.optimizers.step(number, factor)
            self.rows.after_update()
        self.optimizers.zero_grad()
        return StepResult(loss, norm, count, taken)

    def autocast(self) -> torch.autocast:
        """GEMMs in bfloat16 where the run says so; parameters, norms, softmax and sums stay float32."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; a pure function of data, seed and step."""
        windows = self.split.train.windows_of(step)
        shares = parallel.share(windows, self.config.train.micro_batch, self.ranks)
        return [self.split.train.batch(numbers) if len(numbers) else self.split.train.padding() for numbers in shares]

    # ----------------------------------------------------------------------------------------------- before it

    def prepare(self, start: run_folder.Start) -> None:
        """Everything before the first step: compiler, one dry step, length, weights and moments."""
        self.ranks.on_all(lambda: self._check_belongs(start))
        self.display.show(self._describe())
        self.ranks.on_all(self._compile)
        seconds = self.dry_step()
        self.steps = start.steps or self.ranks.on_main(lambda: self._fix_steps(seconds))
        self.ranks.on_all(lambda: self._take(start), SHARED)
        fixed = {"steps": self.steps, "device": self.device, "dtype": str(self.dtype), "identity": self.identity}
        fixed["memory"] = {"planned": asdict(self.plan) | {"peak": self.plan.peak}, "measured": self.measured}
        fixed["command"] = command(self.config.name)
        self.ranks.on_main(lambda: run_folder.begin(self.folder, self.config, start, fixed, self.display.show))
        self.resolved = fixed

    def _take(self, start: run_folder.Start) -> None:
        """Weights, moments and state of the checkpoint that the run goes on from, where there is one."""
        if self.steps < start.step:
            raise UserError(
                f"the run stands at step {start.step}, its end is now asked to be step {self.steps}; give a later "
                "end, or go back with resume=CHECKPOINT"
            )
        if start.checkpoint is None:
            return
        loaded = checkpoint.load(Path(start.checkpoint))
        checkpoint.load_weights_into(self.model, loaded.weights)
        self.optimizers.load_moments(loaded.moments)
        self.state = State.of(loaded)
        self.rows.load(self.state.seen)
        if start.branched:
            self.state.metrics_offset, self.state.last = 0, {}
        self.display.show(f"going on from {start.checkpoint}: step {start.step} of {self.steps}")

    def _describe(self) -> str:
        """One line about the shape of the run."""
        m, t = self.model.config, self.config.train
        return (
            f"model: {sum(p.numel() for p in self.model.parameters()):,} parameters, {m.layers} layers × {m.d}, "
            f"{m.heads}/{m.kv_heads} heads × {m.head_dim}, SwiGLU {m.ffn}; "
            f"{t.global_batch} windows × {t.window} tokens a step; seed {self.config.seed}"
        )

    def _compile(self) -> None:
        """Compiles the model where that is wanted and works."""
        if self.config.compile == "off":
            return
        why = machine.compiler_works(self.device)
        if why and self.config.compile == "on":
            raise UserError(f"compile=on, but nothing can be compiled here: {why}; use compile=auto or compile=off")
        if why:
            self.display.show(f"not compiled: {why}")
        else:
            self.model.compile_blocks()

    def _check_belongs(self, start: run_folder.Start) -> None:
        """Raises :class:`UserError` where the checkpoint has another vocabulary or, not branched from, other data."""
        words, identity = self.tokenizer, self.identity
        if start.vocabulary not in (None, words.digest):
            raise UserError(
                f"the checkpoint {start.checkpoint} was trained with another vocabulary: {start.num_rows} rows, digest "
                f"{start.vocabulary}; the tokenizer {words.folder} has {words.vocab_size}, digest {words.digest}; "
                f"give tokenizer.folder={start.checkpoint}"
            )
        if start.packed not in (None, identity["packed"]) and not start.branched:
            raise UserError(
                f"the checkpoint {start.checkpoint} was trained on other packed data: digest {start.packed}, now "
                f"{identity['packed']} ({identity['packed_folder']}); restore the data, or use name=NEW "
                f"branch={start.checkpoint}"
            )

    def dry_step(self) -> float:
        """Runs a step at full shape and forgets it: compiles, takes the peak of memory, returns seconds per step.

        Weights and moments are put back and no random state is touched, so that it leaves no trace.
        """
        t, train = self.config.train, self.split.train
        weights = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        moments = {key: value.clone() for key, value in self.optimizers.moments().items()}
        shares = parallel.share(np.arange(t.global_batch), t.micro_batch, self.ranks)
        one = train.batch(shares[0] % train.num_windows) if len(shares[0]) else train.padding()
        try:
            self.step(0, [one, one], 0.0)  # compiles, makes the moments, and accumulates on top of a gradient
            seconds = [self._timed([one] * count) for count in (1, 2)]
            with self.autocast():
                self.measured = memory.measure(self.model, self.optimizers.moments(), to_device(one, self.device))
        except torch.OutOfMemoryError as error:
            raise UserError(f"train.micro_batch={t.micro_batch} does not fit: {error}; lower it") from error
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        self.optimizers.load_moments(moments)
        return seconds[0] + max(0.0, seconds[1] - seconds[0]) * (len(shares) - 1)

    def _timed(self, micro_batches: list[Batch]) -> float:
        begin = time.perf_counter()
        self.step(0, micro_batches, 0.0)
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def _fix_steps(self, seconds: float) -> int:
        """The number of steps from whichever length is given; ``seconds`` is what one takes."""
        t, train = self.config.train, self.split.train
        if t.steps is not None:
            return t.steps
        if train.end is not None:
            return -(-train.end // t.global_batch)
        if t.tokens is not None:
            per_step = train.num_targets / train.num_windows * t.global_batch
            return math.ceil(t.tokens / per_step)
        steps = max(1, int(t.minutes * 60 / seconds))
        self.display.show(f"train.minutes={t.minutes}: {seconds:.2f} s a step, so {steps} steps")
        return steps

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self, start: run_folder.Start, wandb: str = "disabled") -> int:
        """Trains to the end; returns the exit code: 0, or 128 + the signal that stopped it.

        ``wandb`` is the mode that :func:`stack.tracking.wandb_run.choose_mode` gave.
        """
        self.prepare(start)
        code, why = 1, "failed"
        try:
            with self._signals(), ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
                if self.ranks.main:
                    self.metrics = self._tracker(wandb)
                code = self._loop(pool)
                why = f"stopped by signal {code - 128}" if code else "finished"
            if self.ranks.main and self.config.track.report:
                self._report()
            return code
        except BaseException as error:
            why = f"failed: {error}"
            raise
        finally:
            self.display.stop()
            if self.metrics is not None:
                text = f"{self.config.name} {why} at step {self.state.step} of {self.steps}"
                self.metrics.alert(why.split(":")[0], text, level="ERROR" if code == 1 else "INFO")
                self.metrics.close(code)

    def _tracker(self, wandb: str) -> Tracker:
        """The record of this run; growth is its first row, where there was any."""
        offset = self.state.metrics_offset
        metrics = Metrics(self.folder, offset)
        if wandb == "disabled":
            tracker = Tracker(metrics)
        else:
            tracker = Tracker(
                metrics, WandbRun(self.folder, wandb, self.config, self.resolved, offset, self.display.show)
            )
        if offset == 0 and "growth" in self.identity:
            facts = {key: value for key, value in self.identity["growth"].items() if isinstance(value, int | float)}
            facts |= self.identity["growth"]["counts"]
            at = {"step": self.state.step, "tokens": self.state.tokens}
            tracker.write(at | {f"growth/{key}": value for key, value in facts.items()})
        return tracker

    def _loop(self, pool: ThreadPoolExecutor) -> int:
        state, begun = self.state, time.perf_counter()
        ahead = pool.submit(self.micro_batches, state.step)
        first, tokens_before = state.step, state.tokens
        self.display.start(state.step, self.steps)
        while state.step < self.steps:
            started = time.perf_counter()
            batches = ahead.result()
            waited = time.perf_counter() - started
            ahead = pool.submit(self.micro_batches, state.step + 1)
            factor = lr_factor(self.config.schedule, state.step, self.steps)
            result = self.step(state.step, batches, factor)
            self._account(result)
            if result.taken:
                self.rows.saw(batches)
            now = time.perf_counter()
            self.memory = machine.memory_figures(self.device)
            self._log(result, factor, now - started, waited)
            speed = (state.tokens - tokens_before) / (now - begun)
            left = (now - begun) / (state.step - first) * (self.steps - state.step)
            self.display.step(state.step, self.steps, self._line(result, speed, waited / (now - started), left))
            stop = self._signal_of_any_rank()
            self._periodic(stopping=stop > 0)
            if stop and state.step < self.steps:
                self.display.show(
                    f"stopped by signal {stop} after step {state.step} of {self.steps}, saved; "
                    "the same command goes on from here"
                )
                return 128 + stop
        self._summary(time.perf_counter() - begun, state.tokens - tokens_before)
        return 0

    def _signal_of_any_rank(self) -> int:
        """The same on every rank: the first of SIGNALS that any of them has, else 0."""
        seen = self.signal  # one look: another may come at any time
        had = self.ranks.sum(*(seen == number for number in SIGNALS))
        return next((number.value for number, ranks in zip(SIGNALS, had, strict=True) if ranks), 0)

    def _account(self, result: StepResult) -> None:
        """Counts the step; raises :class:`UserError` after too many bad ones in a row."""
        state, limit = self.state, self.config.train.max_bad_steps
        state.step += 1
        state.tokens += result.tokens if result.taken else 0
        self.losses += [result.loss] if result.taken else []
        state.skipped_steps += not result.taken
        # A step with nothing to learn is no sign of trouble.
        state.bad_in_a_row = 0 if result.taken else state.bad_in_a_row + (result.tokens > 0)
        if state.bad_in_a_row == BAD_STREAK and self.metrics is not None:
            bad = f"{BAD_STREAK} steps in a row are not finite: loss {result.loss}, norm {result.norm}"
            self.metrics.alert("not finite", f"{self.config.name}: {bad} at step {state.step}")
        if state.bad_in_a_row >= limit:
            good = checkpoint.newest(self.folder / "checkpoints", self.display.show, owner=False)
            raise UserError(
                f"{limit} steps in a row had a loss or gradient norm that is not finite (loss {result.loss}, norm "
                f"{result.norm} at step {state.step}); the last good checkpoint is {good or 'none'}; "
                "lower optim.lr and optim.matrix_lr, or raise schedule.warmup"
            )

    def _periodic(self, stopping: bool) -> None:
        """Validation, samples and a checkpoint, each where it is due."""
        c, step = self.config, self.state.step
        end = step == self.steps
        row: dict[str, Any] = self.rows.figures()
        if end or (c.evaluate.every and step % c.evaluate.every == 0):
            row |= self._validate()
        if end or (c.sample.every and step % c.sample.every == 0):
            try:
                row |= {"samples/texts": self._samples()}
            except UserError as error:  # what there is to look at must not cost what is to be saved
                self.display.show(f"  no samples: {error}")
        if row and self.metrics is not None:
            self.metrics.write({"step": step, "tokens": self.state.tokens} | row)
        if end or stopping or (c.checkpoint.every and step % c.checkpoint.every == 0):
            self.state.seen = self.rows.state()
            self.ranks.on_main(lambda: self._save(row.get("eval/bits_per_byte", row.get("eval/loss"))))

    def _validate(self) -> dict[str, float]:
        """The figures of validation and answers; of neither where nothing is held out."""
        values: dict[str, float] = {}
        finite = True
        if self.split.validation.num_windows:
            values = self.validation().figures()
            finite = math.isfinite(values["loss"])
        if finite:  # a model that is not finite answers nothing
            values |= self._answers()
        self.state.last = values if finite else {}  # JSON has no NaN
        if "loss" in values:
            self.display.show(f"step {self.state.step}: {_figures(values)}")
        return {f"eval/{key}": value for key, value in values.items()}

    def validation(self) -> Validation:
        """One pass over the whole validation split, as the model stands."""
        c = self.config
        with self.autocast():
            return validate(
                self.model,
                self.split.validation,
                self.split.validation_bytes,
                micro_batch=c.evaluate.micro_batch,
                chunk_tokens=c.train.chunk_tokens,
                classes=self.split.classes,
                ranks=self.ranks,
                device=self.device,
                progress=lambda done, of: self.display.wait(f"validation: window {done} of {of}"),
            )

    def _answers(self) -> dict[str, float]:
        """Held-out conversations answered: ``CHECK_SOURCE``, a share; shown as a table."""
        if self.split.chat is None or not self.split.questions:
            return {}
        asked = answers.share(list(self.split.questions), self.ranks)
        with self.autocast():
            made = answers.answer(self.model, self.tokenizer, asked, self.split.answer_tokens)
        table = answers.judge(made, self.split.chat.resolved_sources(), self.ranks)
        for line in answers.lines(table):
            self.display.show(line)
        return {f"{check}_{source}": value for source, checks in table.items() for check, value in checks.items()}

    def _samples(self) -> list[str]:
        """The model's continuation of each prompt; shown, and returned with the prompt in front."""
        s, words = self.config.sample, self.tokenizer
        if not self.ranks.main or not s.prompts:
            return []
        with self.autocast():
            made = generate(
                self.model,
                [self._prompt(text) for text in s.prompts],
                tokens=s.tokens,
                stops=words.stops,
                banned=words.unsampled,
                sampling=Sampling(s.temperature, seed=self.config.seed),
            )
        ends = [ids[:-1] if ids[-1:] and ids[-1] in words.stops else ids for ids in made]
        between = "" if words.end_of_turn is None else "\n"
        texts = [prompt + between + words.decode(ids) for prompt, ids in zip(s.prompts, ends, strict=True)]
        for text in texts:
            self.display.show(f"  sample: {text!r}")
        return texts

    def _prompt(self, text: str) -> list[int]:
        """A text to be continued; for a chat model a question to be answered."""
        words = self.tokenizer
        if words.end_of_turn is None:
            return [words.end_of_text, *words.encode(text)]
        return conversation.encode(words, [{"role": "user", "content": text}], generation_prompt=True)[0]

    def _save(self, metric: float | None) -> None:
        assert self.metrics is not None, "rank 0 has the metrics"
        self.state.metrics_offset = self.metrics.offset()
        checkpoints = self.folder / "checkpoints"
        checkpoint.save(
            checkpoints,
            self.state.step,
            model_config=self.model.config,
            tokenizer=self.tokenizer,
            weights=self.model.state_dict(),
            moments=self.optimizers.moments(),
            state=asdict(self.state),
            identity=self.identity,
            metric=metric,
        )
        checkpoint.retain(checkpoints, self.config.checkpoint.keep)

    def _log(self, result: StepResult, factor: float, seconds: float, waited: float) -> None:
        state = self.state
        if self.metrics is None:
            return
        if state.step % self.config.track.every and state.step != self.steps:
            self.metrics.alive()
            return
        self.metrics.write(
            {
                "step": state.step,
                "tokens": state.tokens,
                "train/loss": result.loss,
                "train/skipped_steps": state.skipped_steps,
                "optim/grad_norm": result.norm,
                **{f"optim/lr_{group['name']}": group["peak_lr"] * factor for group in self.optimizers.groups()},
                "throughput/tokens_per_s": result.tokens / seconds,
                "throughput/waiting_share": waited / seconds,
                **{f"memory/{key}": value for key, value in self.memory.items()},
                "time/step_s": seconds,
                "time/unix_s": time.time(),
            }
        )

    def _line(self, result: StepResult, speed: float, waiting: float, left: float) -> list[str]:
        """What there is to say, the most important first: a narrow window shows the beginning."""
        return [
            f"loss {result.loss:.4f}",
            f"ETA {duration(left)}",
            f"{speed:,.0f} tokens/s",
            f"peak {self.memory['peak_gb']:.2f} GB",
            f"{waiting:.0%} waiting",
            self._validated(),
        ]

    def _validated(self) -> str:
        """The latest validation in a few words."""
        if "loss" in self.state.last:
            return _figures(self.state.last)
        return "no validation yet" if self.split.validation.num_windows else "no validation"

    def _quality(self) -> tuple[str, float | None]:
        """The figure that says how good the model is, by name; None where it is not finite."""
        last = self.state.last
        if not self.split.validation.num_windows and self.losses:
            return "train loss", sum(self.losses) / len(self.losses)
        best = "bits_per_byte" if "bits_per_byte" in last else "loss"
        return best.replace("_", " "), last.get(best)

    def _summary(self, seconds: float, tokens: int) -> None:
        """The five figures that matter, each on a line that fits 40 columns, and where the result lies.

        ``tokens`` were learnt in the ``seconds`` of this start.
        """
        state = self.state
        name, value = self._quality()
        figures = {
            name: "not finite" if value is None else f"{value:.4f}",
            "tokens": f"{state.tokens:,}",
            "tokens/s": f"{tokens / seconds:,.0f}",
            "peak memory": f"{machine.memory_figures(self.device)['peak_gb']:.2f} GB",
            "time": duration(seconds),
        }
        skipped = f", {state.skipped_steps} skipped" if state.skipped_steps else ""
        self.display.stop()
        planned, measured = self.plan.peak / 1e9, self.memory["peak_gb"]
        self.display.show(f"memory of a step: planned {planned:.2f} GB, measured {measured:.2f} GB")
        self.display.show(f"finished: {state.step} steps{skipped}")
        for name, value in figures.items():
            self.display.show(f"  {name:<15} {value:>15}")
        self.display.show(str(self._newest()))

    def _newest(self) -> Path:
        """The checkpoint of this step."""
        return self.folder / "checkpoints" / f"step-{self.state.step:08d}"

    def _report(self) -> None:
        """An audit of the rows, and the page. Whatever goes wrong with either, the run is saved and a line says so."""
        try:
            found = audit.audit(str(self._newest()), known=False, show=self.display.show)
            write_json(self.folder / audit.NAME, found)
        except Exception as error:
            self.display.show(f"no audit: {error}")
        try:
            self.display.show(f"page: {page.write([self.folder], self.folder / page.NAME)}")
        except Exception as error:
            self.display.show(f"no page: {error}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal of SIGNALS lets the step finish and be saved; a second one ends the process at once.

        One that is ignored already stays so, as SIGHUP under nohup.

        What comes within a second of the first is the same one: torchrun passes on what a terminal has sent to all.
        """
        since = 0.0

        def note(number: int, _: Any) -> None:
            nonlocal since
            if self.signal and time.monotonic() - since > 1:
                os._exit(128 + number)
            if not self.signal:
                self.signal, since = number, time.monotonic()

        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _figures(values: dict[str, float]) -> str:
    """A validation in a few words."""
    bits = f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
    return f"validation {values['loss']:.4f} nats per token{bits}"
