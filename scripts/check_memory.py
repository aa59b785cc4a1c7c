"""The plan of memory against what training takes on a CPU: three sizes of at least 1 GB, each in fresh processes.

    python scripts/check_memory.py             exit code 0: every part and every peak within 10 %

Per size one process takes the dry step and four steps, and reads the kernel's high-water mark; another one takes a step
under the profiler, which counts every tensor, but needs memory itself. Ids are random, windows are whole documents.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch.profiler import ProfilerActivity, profile

from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import Config
from stack.core import machine
from stack.core.ranks import ALONE
from stack.data.batches import Batches
from stack.data.packed import Split
from stack.model.decoder import Decoder
from stack.observe import memory
from stack.training.length import dry_step
from stack.training.trainer import Step, micro_batches, to_device

COMMON = ("device=cpu", "precision=float32", "compile=off", "model.context=512", "train.window=512", "model.kv_heads=2")
SIZES = {
    "activations": (
        "model.layers=6", "model.d=256", "model.heads=4", "model.ffn=704", "tokenizer.vocab_size=4096",
        "train.micro_batch=8", "train.global_batch=16",
    ),
    "optimizer": (
        "model.layers=12", "model.d=512", "model.heads=8", "model.ffn=1408", "tokenizer.vocab_size=32768",
        "train.micro_batch=1", "train.global_batch=2", "train.chunk_tokens=512",
    ),
    "logits": (
        "model.layers=2", "model.d=256", "model.heads=4", "model.ffn=704", "tokenizer.vocab_size=32768",
        "train.micro_batch=4", "train.global_batch=8", "train.loss=full", "optim=adamw",
    ),
}  # fmt: skip


def step_of(arguments: tuple[str, ...]) -> tuple[Step, Batches]:
    """What takes steps of these settings, in a process that counts from here on, and what it learns from."""
    with initialize_config_dir(CONF, version_base="1.3"):
        c = typed(compose("train", overrides=[*COMMON, *arguments]))
    import torch._dynamo  # noqa: F401  the optimizers import it: a part of the program

    machine.program_memory()
    return bare_step(c)


def bare_step(c: Config) -> tuple[Step, Batches]:
    """Steps of any size on random ids, without tokenizer and files; every window is one whole segment."""
    t, rows = c.train, c.tokenizer.vocab_size
    ids = np.random.default_rng(0).integers(2, rows, 4 * t.global_batch * (t.window + 1)).astype(np.uint16)
    lengths = np.full(4 * t.global_batch, t.window)
    text = Split("train", lengths, np.arange(len(lengths)) * t.window, 1, (ids,), np.zeros(1, dtype=np.int64))
    train = Batches(text, window=t.window, global_batch=t.global_batch, seed=0, pad_id=1)
    return Step(c, Decoder(c.model, rows, seed=c.seed), ALONE), train


def resident(arguments: tuple[str, ...], out: str) -> None:
    """What the process takes beyond the program."""
    step, train = step_of(arguments)
    c, measured = step.config, partial(memory.measure, step.model)
    dry_step(step, train, lambda one: measured(step.optimizers.moments(), to_device(one, "cpu")))
    for number in range(4):
        step(number, micro_batches(train, train.windows_of(number), step), 1.0)
    found = {"peak": machine.memory_figures("cpu")["peak_gb"] * 1e9}
    inputs = to_device(micro_batches(train, train.windows_of(0), step)[0], "cpu")
    found |= measured(step.optimizers.moments(), inputs)
    step.wrapped(*inputs, step.loss).backward()
    found["gradients"] = sum(p.grad.nbytes for p in step.model.parameters())
    plan = memory.plan_memory(c.model, c, c.tokenizer.vocab_size, "cpu", c.train.largest_forward(1))
    Path(out).write_text(json.dumps([asdict(plan) | {"tensors": plan.tensors, "peak": plan.peak}, found]))


def tensors(arguments: tuple[str, ...], out: str) -> None:
    """The most bytes of tensors that live at one time: in a step, and in its loss alone."""
    step, train = step_of(arguments)
    batch = micro_batches(train, train.windows_of(0), step)
    step(0, batch[:1], 0.0)  # makes the moments
    standing = sum(x.nbytes for x in (*step.model.parameters(), *step.optimizers.moments().values()))
    table, t = step.model.table, step.loss
    hidden = torch.randn(*batch[0].ids.shape, table.weight.shape[1], requires_grad=True)
    found = {"tensors": standing + live(lambda: step(0, batch, 0.0))[1]}

    def loss() -> None:
        table.loss(hidden, batch[0].targets, impl=t.impl, chunk_tokens=t.chunk_tokens, z_loss=t.z_loss).backward()

    loss()  # makes the gradients, which are no part of it
    found["loss"] = live(loss)[1]
    Path(out).write_text(json.dumps(found))


def live(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes of what ``work()`` allocates on the CPU: left at its end, and the most at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        found.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    moves = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = np.cumsum([size for _, size in moves]).tolist()
    return held[-1], max(held)


def main() -> int:
    """Prints the table; 1 where something is off by more than 10 %."""
    spawn, off = multiprocessing.get_context("spawn"), 0
    print(f"{'size':<13}{'part':<13}{'planned':>11}{'measured':>11}{'ratio':>8}")
    for name, arguments in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = [f"{folder}/resident", f"{folder}/tensors"]
            for work, path in zip((resident, tensors), out, strict=True):
                process = spawn.Process(target=work, args=(arguments, path))
                process.start()
                process.join()
                if process.exitcode:
                    return 1
            planned, measured = json.loads(Path(out[0]).read_text())
            measured |= json.loads(Path(out[1]).read_text())
        for part in ("parameters", "gradients", "moments", "activations", "loss", "tensors", "peak"):
            ratio = planned[part] / measured[part]
            off += not 0.9 <= ratio <= 1.1
            print(
                f"{name:<13}{part:<13}{planned[part] / 1e9:8.3f} GB{measured[part] / 1e9:8.3f} GB{ratio:8.3f}",
                flush=True,
            )
        off += measured["peak"] < 1e9
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
