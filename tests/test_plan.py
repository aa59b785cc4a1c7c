"""stack.plan: the figures of the real run, counted another way where that can be, and nothing made on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stack.core import machine
from stack.model.decoder import Decoder
from stack.observe import flops as throughput
from stack.observe import memory


def plan(root: Path, *arguments: str) -> str:
    """The output of ``python -m stack.plan``."""
    more = (f"data_dir={root}/data", f"runs_dir={root}/runs")
    log = root / f"log-{len(list(root.iterdir()))}"
    job = tiny.Job(tiny.command, [*arguments, *more], "stack.plan", log=log)
    assert job.wait() == 0, job.output()
    return job.output()


def test_the_real_run_on_a_stated_gpu(tmp_path: Path) -> None:
    text = plan(tmp_path, "experiment=stack_100m", "train.micro_batch=16")
    for figure in (
        "101,353,728 parameters", "16,777,216   16.6%", "10.74 GB (2.15 + 4.29 + 4.29",
        "chunks of 4,096 tokens: 0.81 GB", "608M", "797M", "985M",
        "20.0B tokens: 38,147 steps", "H100 SXM, peak 989 TFLOP/s stated",
    ):  # fmt: skip
        assert figure in text, figure
    hours = 38147 * 2**19 * 985e6 / (989e12 * 0.3) / 3600
    assert float(re.search(r"([\d.]+) hours", text)[1]) == pytest.approx(hours, rel=0.001)
    assert max(map(len, text.splitlines())) <= 80
    assert not (tmp_path / "data").exists() and not (tmp_path / "runs").exists()


def test_more_devices_cost_as_much_and_take_less_time(tmp_path: Path) -> None:
    found = [plan(tmp_path, "experiment=stack_100m", f"plan.count={n}", "plan.price=3") for n in (1, 4)]
    hours = [float(re.search(r"([\d.]+) hours", text)[1]) for text in found]
    assert hours[0] == pytest.approx(4 * hours[1], rel=0.01)
    prices = [re.search(r"\$([\d.]+) at", text)[1] for text in found]
    assert prices[0] == prices[1]


def test_this_machine_is_measured(tmp_path: Path) -> None:
    text = plan(tmp_path, "plan=here", "data=none", "data.files=[/not/there.txt]", "device=cpu")
    assert "TFLOP/s measured" in text and "whose size nobody knows yet" in text and "$" not in text


def test_flops_are_those_that_torch_counts(tmp_path: Path) -> None:
    """A forward pass is a third; its attention kernel is counted over the whole window."""
    c = tiny.configure(*tiny.settings(tmp_path, "model.heads=4", "model.kv_heads=2"))
    model = Decoder(c.model, 320)
    plain = sdpa_kernel(SDPBackend.MATH)  # the fused kernel of CPUs is not counted
    with torch.no_grad(), plain, FlopCounterMode(display=False) as counted:
        model.logits(torch.zeros(3, 32, dtype=torch.int64))
    flops = throughput.flops_per_token(c.model, 320, 32)
    assert 3 * counted.get_total_flops() == 3 * 32 * flops.full
    assert flops.causal - flops.dense == flops.full - flops.causal > 0


def test_parameters_by_part_are_those_of_the_model(tmp_path: Path) -> None:
    for norm in ("true", "false"):
        c = tiny.configure(*tiny.settings(tmp_path, f"model.qk_norm={norm}"))
        shapes = {name: p.numel() for name, p in Decoder(c.model, 320).named_parameters()}
        keys = {"table": "embed_tokens", "attention": "_proj.weight", "mlp": "mlp.", "norms": "norm"}
        parts = memory.parameters_by_part(c.model, 320)
        for part, key in keys.items():
            mine = [n for name, n in shapes.items() if key in name and (part != "attention" or "self_attn" in name)]
            assert parts[part] == sum(mine), part
        assert sum(parts.values()) == sum(shapes.values())


def test_a_run_keeps_its_plan_beside_what_it_measured(tmp_path: Path) -> None:
    job = tiny.train(tmp_path, "train.steps=2")
    assert job.wait() == 0, job.output()
    assert re.search(r"memory of a step: planned [\d.]+ GB, measured [\d.]+ GB", job.output())
    folder = tmp_path / "runs/tiny"
    kept = yaml.safe_load((folder / "config.yaml").read_text())["resolved"]["memory"]
    for part in ("parameters", "moments"):
        assert kept["planned"][part] == kept["measured"][part] > 0
    assert kept["measured"]["activations"] == pytest.approx(kept["planned"]["activations"], rel=0.05)
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["memory/peak_gb"] < row["memory/process_peak_gb"]


def _take(out: str) -> None:
    machine.program_memory()
    before = machine.memory_figures("cpu")["peak_gb"]
    block = torch.ones(50_000_000)  # 0.2 GB
    del block
    Path(out).write_text(json.dumps([before, machine.memory_figures("cpu")["peak_gb"]]))


@pytest.mark.skipif(not machine.STATUS.exists(), reason="Linux")
def test_what_is_measured_is_what_is_taken_after_the_program(tmp_path: Path) -> None:
    job = tiny.Job(_take, str(tmp_path / "out"), log=tmp_path / "log")
    assert job.wait() == 0, job.output()
    before, after = json.loads((tmp_path / "out").read_text())
    assert before < 0.02 and after == pytest.approx(0.2, abs=0.02)
