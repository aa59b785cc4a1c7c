"""stack.diagnostics.memory: the plan against what a process really takes, and what a plan that does not fit says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch

from stack import machine
from stack.config import UserError
from stack.diagnostics import memory

COMMON = ("tokenizer.vocab_size=4096", "model.head_dim=64", "model.context=512", "train.window=512", "optim=muon")
SIZES = {
    "activations": (
        *COMMON, "model.layers=6", "model.d=64", "model.heads=2", "model.head_dim=32", "model.ffn=176",
        "train.micro_batch=24", "train.global_batch=48", "train.loss=fused", "tokenizer.vocab_size=320",
    ),
    "optimizer": (
        *COMMON, "model.layers=6", "model.d=512", "model.heads=8", "model.kv_heads=2", "model.ffn=1408",
        "train.micro_batch=1", "train.global_batch=2", "train.loss=checkpoint", "train.chunk_tokens=512",
    ),
    "logits": (
        *COMMON, "tokenizer.vocab_size=16384", "model.layers=2", "model.d=128", "model.heads=2", "model.ffn=256",
        "train.micro_batch=3", "train.global_batch=6", "train.loss=full", "optim=adamw",
    ),
}  # fmt: skip


def resident(key: str) -> int:
    """``VmHWM``, ``RssAnon`` or ``RssFile`` of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _measure(arguments: list[str], out: str) -> None:
    """In a process of its own: what steps of two micro-batches take beyond the program itself (its files apart)."""
    torch.set_num_threads(1)
    c = tiny.configure(*arguments)
    before = resident("RssAnon")
    trainer = tiny.bare_trainer(c)
    for step in range(2):
        trainer.step(step, trainer.micro_batches(step), 1.0)
    Path(out).write_text(json.dumps(resident("VmHWM") - resident("RssFile") - before))


@pytest.mark.parametrize("name", ["activations", pytest.param("optimizer", marks=pytest.mark.slow), "logits"])
def test_the_plan_is_what_a_step_takes(name: str, tmp_path: Path) -> None:
    arguments = tiny.settings(tmp_path, *SIZES[name])
    c = tiny.configure(*arguments)
    planned = memory.plan_memory(c.model, c, c.tokenizer.vocab_size, "cpu", c.train.micro_batch)
    job = tiny.Job(_measure, arguments, str(tmp_path / "peak"), log=tmp_path / "log")
    assert job.wait() == 0, job.output()
    measured = json.loads((tmp_path / "peak").read_text())
    print(f"{name}: planned {planned.peak / 1e9:.3f} GB, measured {measured / 1e9:.3f} GB")
    assert measured > 0.3e9
    assert 0.8 * measured <= planned.peak <= 1.25 * measured, "\n".join(planned.lines())


def test_what_does_not_fit_is_refused_with_a_micro_batch_that_does(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    c = tiny.configure(*tiny.settings(tmp_path, "train.micro_batch=40", "train.global_batch=64"))
    rows = c.tokenizer.vocab_size

    def peak(micro_batch: int) -> int:
        return memory.plan_memory(c.model, c, rows, "cpu", micro_batch).peak

    assert [peak(n) < peak(n + 1) for n in range(1, 64)] == [True] * 63
    for free, fits in ((peak(40) - 1, 39), (peak(17), 17), (peak(1), 1)):
        monkeypatch.setattr(machine, "free_memory", lambda device, free=free: free)
        with pytest.raises(UserError, match=f"train.micro_batch={fits} would fit") as error:
            memory.check_memory(c.model, c, rows, "cpu", print)
        assert re.search(r"train.micro_batch=40 needs .* GB, .* GB are free", str(error.value))
        assert "activations" in str(error.value)
    monkeypatch.setattr(machine, "free_memory", lambda device: peak(1) - 1)
    with pytest.raises(UserError, match=r"not even train.micro_batch=1 fits; lower train.window"):
        memory.check_memory(c.model, c, rows, "cpu", print)
    monkeypatch.setattr(machine, "free_memory", lambda device: peak(40))
    memory.check_memory(c.model, c, rows, "cpu", print)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two processes share this machine
    with pytest.raises(UserError, match="would fit"):
        memory.check_memory(c.model, c, rows, "cpu", print)


def test_it_is_told_before_anything_is_built(tmp_path: Path) -> None:
    more = ("model.context=1000000", "train.window=1000000", "train.micro_batch=1000", "train.global_batch=1000")
    job = tiny.train(tmp_path, *more)
    assert job.wait() == 2, job.output()
    assert re.search(
        r"error: train.micro_batch=1000 needs [\d.]+ GB, [\d.]+ GB are free; train.micro_batch=\d+ would", job.output()
    )
    assert "parameters," not in job.output()


def test_parameters_and_moments_are_exact(tmp_path: Path) -> None:
    for kind in ("muon", "adamw"):
        c = tiny.configure(*tiny.settings(tmp_path, f"optim={kind}"))
        trainer = tiny.bare_trainer(c)
        plan = memory.plan_memory(c.model, c, c.tokenizer.vocab_size, "cpu", 1)
        trainer.step(0, trainer.micro_batches(0), 1.0)
        assert plan.parameters == plan.gradients == sum(p.nbytes for p in trainer.model.parameters())
        assert plan.moments == sum(m.nbytes for m in trainer.optimizers.moments().values() if m.dim())
