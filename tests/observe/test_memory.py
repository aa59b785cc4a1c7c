"""stack.observe.memory: the plan against what a process really takes, and what a plan that does not fit says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch

from stack.core import machine
from stack.core.errors import UserError
from stack.core.ranks import ALONE, Ranks
from stack.data.batches import Batch
from stack.evaluation.validation import to_device
from stack.model.decoder import Decoder
from stack.model.loss import linear_cross_entropy
from stack.observe import memory
from stack.training.trainer import micro_batches

check_memory = tiny.script("check_memory")

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
    step, train = check_memory.bare_step(c)
    for number in range(2):
        step(number, micro_batches(train, train.windows_of(number), step), 1.0)
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
            memory.check_memory(c.model, c, rows, "cpu", ALONE, print)
        assert re.search(r"train.micro_batch=40 needs .* GB, .* GB are free", str(error.value))
        assert "activations" in str(error.value)
    monkeypatch.setattr(machine, "free_memory", lambda device: peak(1) - 1)
    with pytest.raises(UserError, match=r"not even train.micro_batch=1 fits; lower train.window"):
        memory.check_memory(c.model, c, rows, "cpu", ALONE, print)
    monkeypatch.setattr(machine, "free_memory", lambda device: peak(40))
    memory.check_memory(c.model, c, rows, "cpu", ALONE, print)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two processes share this machine
    with pytest.raises(UserError, match="would fit"):
        memory.check_memory(c.model, c, rows, "cpu", ALONE, print)
    monkeypatch.setattr(machine, "free_memory", lambda device: 2 * peak(16))
    memory.check_memory(c.model, c, rows, "cpu", Ranks(world=4), print)  # 16 windows of the 64 are one rank's
    with pytest.raises(UserError, match=r"train.micro_batch=16 would fit"):
        memory.check_memory(c.model, c, rows, "cpu", Ranks(world=3), print)


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
        step, train = check_memory.bare_step(c)
        plan = memory.plan_memory(c.model, c, c.tokenizer.vocab_size, "cpu", 1)
        step(0, micro_batches(train, train.windows_of(0), step), 1.0)
        assert plan.parameters == plan.gradients == sum(p.nbytes for p in step.model.parameters())
        assert plan.moments == sum(m.nbytes for m in step.optimizers.moments().values() if m.dim())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("qk_norm", ["true", "false"])
def test_activations_are_those_that_a_whole_model_keeps(precision: str, qk_norm: str, tmp_path: Path) -> None:
    """The plan counts one block and two on a few tokens; here three blocks keep what several segments need."""
    more = (f"precision={precision}", f"model.qk_norm={qk_norm}", "model.layers=3", "train.window=64")
    c = tiny.configure(*tiny.settings(tmp_path, *more))
    plan = memory.plan_memory(c.model, c, 320, "cpu", 5)
    model = Decoder(c.model, 320)
    ids = torch.zeros(5, 64, dtype=torch.int64)
    batch = Batch(ids, ids, torch.arange(64).expand(5, 64), ((64,), (20, 44), (1, 63), (64,), (30, 30)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        kept = memory.kept_bytes(model, *to_device(batch, "cpu")[:3])
    assert kept == pytest.approx(plan.activations, rel=0.01)


def test_counting_what_is_kept_keeps_nothing(tmp_path: Path) -> None:
    """An output that is kept for its own backward pass must not keep itself alive."""
    c = tiny.configure(*tiny.settings(tmp_path))
    model, ids = Decoder(c.model, 320), torch.zeros(8, 64, dtype=torch.int64)
    inputs = to_device(Batch(ids, ids, torch.arange(64).expand(8, 64), ((64,),) * 8), "cpu")[:3]
    memory.kept_bytes(model, *inputs)
    left, peak = check_memory.live(lambda: memory.kept_bytes(model, *inputs))
    assert left < 0.01 * peak


@pytest.mark.parametrize("impl", ["full", "checkpoint", "fused"])
@pytest.mark.parametrize(("precision", "z_loss", "softcap"), [
    ("float32", 0.0, None), ("float32", 1e-4, None), ("float32", 0.0, 30.0), ("bf16", 1e-4, None),
])  # fmt: skip
def test_the_loss_takes_what_the_plan_says(
    impl: str, precision: str, z_loss: float, softcap: float | None, tmp_path: Path
) -> None:
    tokens, rows, d = 512, 4096, 64
    more = ("train.chunk_tokens=128", f"train.z_loss={z_loss}")
    c = tiny.configure(*tiny.settings(tmp_path, *more))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    hidden, weight = torch.randn(tokens, d, requires_grad=True), torch.randn(rows, d, requires_grad=True)
    targets = torch.randint(rows, (tokens,))

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            more = {"chunk_tokens": 128, "z_loss": z_loss, "softcap": softcap}
            loss = linear_cross_entropy(hidden, weight, targets, impl=impl, **more)
        loss.backward()

    work()  # makes the gradients, which are other parts
    planned = memory.loss_memory(c.train, impl, tokens, rows, d, dtype, capped=softcap is not None)
    assert check_memory.live(work)[1] == pytest.approx(planned, rel=0.02)
