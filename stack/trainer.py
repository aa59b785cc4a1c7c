"""One optimizer step, and the loop around it. Pretraining and fine-tuning share both.

The loss of a step is the sum of the token losses of the whole global batch divided by its number of supervised
tokens, counted over all ranks before the first forward pass. So neither accumulation nor ranks nor padding change
the number, the gradient or its norm.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stack import checkpoint, machine, parallel, run_folder
from stack.config import LENGTHS, Config, UserError
from stack.data.batches import Batch, Batches, Windows
from stack.diagnostics.memory import largest_micro_batch, plan_memory
from stack.distributed import Ranks
from stack.evaluate import Validation, to_device, validate
from stack.generate import generate
from stack.model.transformer import Decoder, Loss
from stack.optim import Optimizers, lr_factor
from stack.tokenizer import Tokenizer
from stack.tracking import Display, Metrics, duration


@dataclass
class State:
    """Where a run stands; all that a checkpoint holds beside weights and moments."""

    step: int = 0  # optimizer steps behind it, skipped ones counted
    tokens: int = 0  # supervised tokens
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    best: float | None = None  # bits per byte
    last: dict[str, float] = field(default_factory=dict)  # of the latest validation
    metrics_offset: int = 0


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
    validation: Windows
    validation_bytes: int


class Trainer:
    """Trains ``model`` in a run's folder, from nothing, from its newest checkpoint or from a branch point.

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
        config: Config,
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
        self.folder = Path(config.runs_dir) / config.name
        self.loss = Loss(config.train.loss, config.train.chunk_tokens, config.train.z_loss)
        self.optimizers = Optimizers(
            model, config.optim, ns_dtype=torch.bfloat16 if machine.fast_bf16(self.device) else torch.float32
        )
        self.wrapped = parallel.wrap(model, ranks)
        self.state = State()
        self.steps = 0
        self.signal = 0

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
        taken = bool(np.isfinite(loss) and np.isfinite(norm))
        if taken:
            if self.config.train.clip:
                clip_grads_with_norm_(parameters, self.config.train.clip, total_norm)
            self.optimizers.step(number, factor)
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

    def prepare(self) -> bool:
        """Everything before the first step: memory, one dry step, start point, length. False: nothing is left to do."""
        saved = run_folder.read_config(self.folder)
        if saved is not None:
            run_folder.check_unchanged(self.folder, saved[0], self.config)
        start = self.ranks.on_main(
            lambda: str(run_folder.start_point(self.folder, self.config, self.display.show) or "")
        )
        loaded = checkpoint.load(Path(start)) if start else None
        if loaded is not None:
            self._check_belongs(loaded)
            self.state = State(**loaded.state)
        lengths = {key: getattr(self.config.train, key) for key in LENGTHS}
        known = saved is not None and saved[1]["length"] == lengths and not (loaded and self._from_branch(loaded))
        self.steps = saved[1]["steps"] if known else 0
        if known and self.state.step >= self.steps:
            return False
        self._check_memory()
        seconds = self.dry_step()
        if not known:
            self.steps = self.ranks.on_main(lambda: self._fix_steps(seconds))
        if self.config.train.epochs is not None:
            self.split.train.end = round(self.config.train.epochs * self.split.train.num_windows)
        if self.steps < self.state.step:
            raise UserError(
                f"the run stands at step {self.state.step}, its end is now asked to be step {self.steps}; give a later "
                "end, or go back with resume=CHECKPOINT"
            )
        if loaded is not None:
            checkpoint.load_weights_into(self.model, loaded.weights)
            self.optimizers.load_moments(loaded.moments)
            self.display.show(f"going on from {start}: step {self.state.step} of {self.steps}")
            if self._from_branch(loaded):
                self.state.metrics_offset = 0
        if self.ranks.main:
            resolved = {"steps": self.steps, "length": lengths, "device": self.device, "dtype": str(self.dtype)}
            run_folder.write_config(self.folder, self.config, resolved | {"identity": self.identity})
        return self.state.step < self.steps

    def _from_branch(self, loaded: checkpoint.Loaded) -> bool:
        return loaded.folder.resolve().parent != (self.folder / "checkpoints").resolve()

    def _check_belongs(self, loaded: checkpoint.Loaded) -> None:
        m = loaded.manifest
        if m.vocabulary_digest != self.tokenizer.digest:
            raise UserError(
                f"the checkpoint {loaded.folder} was trained with another vocabulary: {m.num_rows} rows, digest "
                f"{m.vocabulary_digest}; the tokenizer {self.tokenizer.folder} has {self.tokenizer.vocab_size}, digest "
                f"{self.tokenizer.digest}; give tokenizer.folder={loaded.folder}"
            )
        theirs, ours = m.identity.get("packed"), self.identity["packed"]
        if theirs != ours and not self._from_branch(loaded):
            raise UserError(
                f"the checkpoint {loaded.folder} was trained on other packed data: digest {theirs}, now {ours} "
                f"({self.identity['packed_folder']}); restore the data, or use name=NEW branch={loaded.folder}"
            )

    def _check_memory(self) -> None:
        """Raises :class:`UserError` where the plan does not fit, with a micro-batch that would."""
        c, rows = self.config, self.model.table.weight.shape[0]
        share = 1 if self.device == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        plan = plan_memory(c, rows, self.dtype, min(c.train.micro_batch, c.train.global_batch))
        free = (machine.free_memory(self.device) + plan.parameters) // share  # the parameters are there already
        self.display.show(f"memory: {plan.peak / 1e9:.2f} GB planned for a step, {free / 1e9:.2f} GB free")
        if plan.peak <= free:
            return
        fits = largest_micro_batch(c, rows, self.dtype, free)
        way = f"train.micro_batch={fits} would fit" if fits else "not even train.micro_batch=1 fits; lower train.window"
        lines = "\n".join(f"  {line}" for line in plan.lines())
        raise UserError(
            f"train.micro_batch={c.train.micro_batch} needs {plan.peak / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
            f"{way}\n{lines}"
        )

    def dry_step(self) -> float:
        """Runs a step at full shape and forgets it: compiles, takes the peak of memory, returns seconds per step.

        Learning rates are 0 and weights, moments and random states are put back, so that it leaves no trace.
        """
        t = self.config.train
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        moments = {key: value.clone() for key, value in self.optimizers.moments().items()}
        train = self.split.train
        shares = parallel.share(np.arange(t.global_batch), t.micro_batch, self.ranks)
        one = train.batch(shares[0] % train.num_windows) if len(shares[0]) else train.padding()
        try:
            self.step(0, [one, one], 0.0)  # compiles, makes the moments, and accumulates on top of a gradient
            begin = time.perf_counter()
            self.step(0, [one], 0.0)
            seconds = time.perf_counter() - begin
        except torch.OutOfMemoryError as error:
            raise UserError(f"train.micro_batch={t.micro_batch} does not fit: {error}; lower it") from error
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        self.optimizers.load_moments(moments)
        return seconds * len(shares)

    def _fix_steps(self, seconds: float) -> int:
        """The number of steps from whichever length is given."""
        t, train = self.config.train, self.split.train
        if t.steps is not None:
            return t.steps
        if t.epochs is not None:
            return -(-round(t.epochs * train.num_windows) // t.global_batch)
        if t.tokens is not None:
            per_step = train.split.num_targets / train.num_windows * t.global_batch
            return max(1, -(-int(t.tokens) // max(1, int(per_step))))
        steps = max(1, int(t.minutes * 60 / seconds))
        self.display.show(f"train.minutes={t.minutes}: {seconds:.2f} s a step, so {steps} steps")
        return steps

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Trains to the end; returns the exit code: 0, or 128 + the signal that stopped it."""
        if not self.prepare():
            self.display.show(f"finished already: step {self.state.step} of {self.steps}")
            self._summary()
            return 0
        self.metrics = Metrics(self.folder, self.state.metrics_offset) if self.ranks.main else None
        try:
            with self._signals(), ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
                return self._loop(pool)
        finally:
            self.display.stop()
            if self.metrics is not None:
                self.metrics.close()

    def _loop(self, pool: ThreadPoolExecutor) -> int:
        state, begun = self.state, time.perf_counter()
        ahead: Future[list[Batch]] = pool.submit(self.micro_batches, state.step)
        first, tokens_before = state.step, state.tokens
        self.display.start(state.step, self.steps)
        while state.step < self.steps:
            started = time.perf_counter()
            batches = ahead.result()
            waited = time.perf_counter() - started
            if state.step + 1 < self.steps:
                ahead = pool.submit(self.micro_batches, state.step + 1)
            factor = lr_factor(self.config.schedule, state.step, self.steps)
            result = self.step(state.step, batches, factor)
            self._account(result)
            seconds = time.perf_counter() - started
            speed = (state.tokens - tokens_before) / (time.perf_counter() - begun)
            self._log(result, factor, seconds, waited)
            left = (time.perf_counter() - begun) / (state.step - first) * (self.steps - state.step)
            self.display.step(state.step, self.steps, self._line(result, speed, waited / seconds, left))
            stop = int(max(self.ranks.sum(self.signal)))
            self._periodic(stopping=stop > 0)
            if stop:
                code = self.signal or stop
                self.display.show(
                    f"stopped by signal {code} after step {state.step} of {self.steps}, saved; "
                    "the same command goes on from here"
                )
                return 128 + code
        self._summary()
        return 0

    def _account(self, result: StepResult) -> None:
        """Counts the step; raises :class:`UserError` after too many bad ones in a row."""
        state, limit = self.state, self.config.train.max_bad_steps
        state.step += 1
        state.tokens += result.tokens if result.taken else 0
        state.skipped_steps += not result.taken
        # A step with nothing to learn is no sign of trouble.
        state.bad_in_a_row = 0 if result.taken else state.bad_in_a_row + (result.tokens > 0)
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
        row: dict[str, Any] = {}
        if end or (c.evaluate.every and step % c.evaluate.every == 0):
            row |= self._validate()
        if end or (c.sample.every and step % c.sample.every == 0):
            row |= {"samples/texts": self._samples()}
        if row and self.metrics is not None:
            self.metrics.write({"step": step, "tokens": self.state.tokens} | row)
        if end or stopping or (c.checkpoint.every and step % c.checkpoint.every == 0):
            self.ranks.on_main(lambda: self._save(row.get("eval/bits_per_byte")))

    def _validate(self) -> dict[str, float]:
        found = self.validation()
        self.state.last = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
        self.state.best = min(found.bits_per_byte, self.state.best or found.bits_per_byte)
        self.display.show(
            f"step {self.state.step}: validation {found.loss:.4f} nats per token, "
            f"{found.bits_per_byte:.4f} bits per byte"
        )
        return {f"eval/{key}": value for key, value in self.state.last.items()}

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
                ranks=self.ranks,
                device=self.device,
            )

    def _samples(self) -> list[str]:
        """The model's continuation of each prompt; shown, and returned with the prompt in front."""
        s, tokenizer = self.config.sample, self.tokenizer
        if not self.ranks.main or not s.prompts:
            return []
        prompts = [[tokenizer.end_of_text, *tokenizer.encode(prompt)] for prompt in s.prompts]
        with self.autocast():
            answers = generate(
                self.model,
                prompts,
                tokens=s.tokens,
                stops=[tokenizer.end_of_text],
                banned=tokenizer.unsampled,
                temperature=s.temperature,
                seed=self.config.seed,
            )
        ends = [answer[:-1] if answer[-1:] == [tokenizer.end_of_text] else answer for answer in answers]
        texts = [prompt + tokenizer.decode(ids) for prompt, ids in zip(s.prompts, ends, strict=True)]
        for text in texts:
            self.display.show(f"  sample: {text!r}")
        return texts

    def _save(self, metric: float | None) -> None:
        assert self.metrics is not None, "rank 0 has the metrics"
        self.state.metrics_offset = self.metrics.offset()
        checkpoints = self.folder / "checkpoints"
        checkpoint.save(
            checkpoints,
            self.state.step,
            model_config=self.config.model,
            tokenizer=self.tokenizer,
            weights=self.model.state_dict(),
            moments=self.optimizers.moments(),
            state=asdict(self.state),
            identity=self.identity,
            metric=metric,
        )
        checkpoint.retain(checkpoints, self.config.checkpoint.keep)

    def _log(self, result: StepResult, factor: float, seconds: float, waited: float) -> None:
        if self.metrics is None or (self.state.step % self.config.track.every and self.state.step != self.steps):
            return
        row = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "train/loss": result.loss,
            "train/skipped_steps": self.state.skipped_steps,
            "optim/grad_norm": result.norm,
        }
        row |= {f"optim/lr_{group['name']}": group["peak_lr"] * factor for group in self.optimizers.groups()}
        self.metrics.write(
            row
            | {
                "throughput/tokens_per_s": result.tokens / seconds,
                "throughput/waiting_share": waited / seconds,
                "memory/peak_gb": machine.peak_memory(self.device) / 1e9,
                "time/step_s": seconds,
                "time/unix_s": time.time(),
            }
        )

    def _line(self, result: StepResult, speed: float, waiting: float, left: float) -> str:
        bits = self.state.last.get("bits_per_byte")
        return "  ".join(
            [
                f"loss {result.loss:.4f}",
                f"{bits:.4f} bits/byte" if bits is not None else "no validation yet",
                f"{speed:,.0f} tokens/s",
                f"{waiting:.0%} waiting",
                f"peak {machine.peak_memory(self.device) / 1e9:.2f} GB",
                f"ETA {duration(left)}",
            ]
        )

    def _summary(self) -> None:
        last, state = self.state.last, self.state
        if not last:
            return
        self.display.show(
            f"{state.step} steps, {state.tokens:,} tokens, {state.skipped_steps} skipped; validation "
            f"{last['loss']:.4f} nats per token, {last['bits_per_byte']:.4f} bits per byte"
        )
        self.display.show(f"checkpoint: {self.folder}/checkpoints/step-{state.step:08d}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the step finish and be saved; a second one ends the process at once."""

        def note(number: int, _: Any) -> None:
            if self.signal:
                os._exit(128 + number)
            self.signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
