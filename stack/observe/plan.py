"""The plan of a training run, in lines: parameters, memory, time and price, disk."""

from __future__ import annotations

import os

from stack.config.schema import Planned, Source
from stack.core import machine
from stack.core.errors import UserError
from stack.data.encoding import id_dtype
from stack.data.sources import expected_bytes
from stack.observe import flops as throughput
from stack.observe import memory
from stack.tracking.terminal import duration

_GB = 1e9


def lines(config: Planned, device: str) -> list[str]:
    """All of it, for the machine of ``config.plan``, whose devices are of the kind ``device``."""
    return [*_parameters(config), *_memory(config, device), *_time(config, device), *_disk(config)]


def _parameters(config: Planned) -> list[str]:
    parts = memory.parameters_by_part(config.model, config.tokenizer.vocab_size)
    total = sum(parts.values())
    rows = [f"  {name:<12}{count:>14,}{count / total:>8.1%}" for name, count in parts.items()]
    return [f"{config.name}: {total:,} parameters", *rows]


def _memory(config: Planned, device: str) -> list[str]:
    m, t, num_rows = config.model, config.train, config.tokenizer.vocab_size
    micro_batch = t.largest_forward(config.plan.count)
    tokens = micro_batch * t.window
    dtype = machine.choose_precision(config.precision, device)
    name = str(dtype).removeprefix("torch.")
    plan = memory.plan_memory(m, config, num_rows, device, micro_batch)
    free = machine.free_memory(device) if config.plan.memory_gb is None else int(config.plan.memory_gb * _GB)
    fits = memory.largest_micro_batch(m, config, num_rows, device, free)
    again = memory.recomputed(m, tokens, dtype)
    kinds = {f"in {name}": dtype.itemsize, "in float32": 4, "their gradient": 4}
    tensors = [tokens * num_rows * size for size in kinds.values()]
    chunk = memory.chunk_logits(t, tokens, num_rows, dtype)
    full = " + ".join(f"{size / _GB:.2f}" for size in tensors)

    def loss(way: str) -> str:
        size = memory.loss_memory(t, way, tokens, num_rows, m.d, dtype, capped=m.softcap is not None)
        return f"  {way:<12}{size / _GB:8.2f} GB"

    return [
        f"memory of a step on {config.plan.name}: micro-batch {micro_batch} x {t.window:,} tokens, {name}",
        *(f"  {line}" for line in plan.lines()),
        f"  fits {free / _GB:.2f} GB: train.micro_batch={fits} at most (of train.global_batch={t.global_batch})",
        f"  activations if blocks were recomputed, which stack.train cannot do: {again / _GB:.2f} GB",
        f"full logits: {sum(tensors) / _GB:.2f} GB ({full})",
        f"  {', '.join(kinds)}",
        f"  in chunks of {t.chunk_tokens:,} tokens: {chunk / _GB:.2f} GB",
        f"the loss with all that it makes (train.loss={t.loss}):",
        *map(loss, ("full", "checkpoint", "fused")),
    ]


def _time(config: Planned, device: str) -> list[str]:
    m, t, p = config.model, config.train, config.plan
    flops = throughput.flops_per_token(m, config.tokenizer.vocab_size, t.window)
    lines = [
        "FLOPs per token",
        f"  {flops.dense / 1e6:8.0f}M without attention: 6 x parameters in GEMMs, the table once",
        f"  {flops.causal / 1e6:8.0f}M causal: half of the window of {t.window:,} attended to",
        f"  {flops.full / 1e6:8.0f}M by 12 L d S: all of it; MFU counts these",
    ]
    per_step = t.global_batch * t.window
    tokens = t.steps * per_step if t.steps is not None else t.tokens
    if tokens is None:
        return [*lines, "time: give train.steps or train.tokens; minutes and epochs are measured by stack.train"]
    dtype = machine.choose_precision(config.precision, device)
    peak = p.tflops * 1e12 if p.tflops is not None else throughput.measured_peak(m, device, dtype)
    how = "measured" if p.tflops is None else "stated"
    seconds = throughput.training_seconds(tokens, flops.full, peak * p.count, p.mfu)
    return [
        *lines,
        f"time for {_short(tokens)} tokens: {-(-int(tokens) // per_step):,} steps of {per_step:,}",
        f"  {p.count} x {p.name}, peak {peak / 1e12:.4g} TFLOP/s {how}, MFU {p.mfu:.0%} assumed",
        f"  {seconds / 3600:.2f} hours ({duration(seconds)}), {tokens / seconds:,.0f} tokens/s",
        *([f"  ${seconds / 3600 * p.count * p.price:,.2f} at ${p.price:.2f} an hour for one"] if p.price else []),
    ]


def _short(count: float) -> str:
    """``20.0B``, ``1.6M``."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _disk(config: Planned) -> list[str]:
    m, num_rows = config.model, config.tokenizer.vocab_size
    sizes = [_text_mb(source) for source in config.data.resolved_sources().values()]
    text = sum(size for size in sizes if size is not None)
    more = "" if None not in sizes else " (and sources whose size nobody knows yet)"
    processes = config.data.workers or os.cpu_count() or 1
    packing = duration(text / (config.plan.packing_mb_s * processes))
    one = memory.checkpoint_bytes(m, config.optim, num_rows)
    kept = config.checkpoint.keep + 2
    wide = id_dtype(num_rows).itemsize
    return [
        "disk and packing",
        f"  packed data: {wide} bytes a token, {wide:.2f} GB for each billion",
        f"  checkpoints: {one / _GB:.2f} GB each (weights and moments, float32), {kept * one / _GB:.2f} GB for {kept}:",
        f"    the newest {config.checkpoint.keep}, the best, and the one being written",
        f"  packing: {text:,.0f} MB of text{more} takes {packing} by {processes} processes",
        f"    at {config.plan.packing_mb_s:g} MB/s each (plan.packing_mb_s)",
    ]


def _text_mb(source: Source) -> float | None:
    """MB of text that are read of a source, weight counted; None where nobody knows before reading."""
    try:
        size = expected_bytes(source)
    except UserError:  # not fetched yet
        size = None if source.max_mb is None else source.max_mb * 1e6
    return None if size is None else size / 1e6 * source.weight
