"""Runs for tests of the page: folders written by the program's own parts, without training."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import tiny

from stack.tracking.metrics import Metrics
from stack.training import run_folder

CLASSES = ("never", "rare", "frequent", "control")


def write(root: Path, name: str, rows: list[dict[str, Any]], *settings: str, **resolved: Any) -> Path:
    """``root/runs/NAME`` with ``config.yaml`` and ``metrics.jsonl``; ``settings`` override the small run's."""
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    config = tiny.configure(*tiny.settings(root, f"name={name}", *settings))
    fixed = {"steps": config.train.steps, "device": "cpu", "dtype": "torch.float32", "identity": {"run": name}}
    run_folder.begin(folder, config, run_folder.ResumePoint(), fixed | resolved, print)
    metrics = Metrics(folder, 0)
    for row in rows:
        metrics.write(row)
    metrics.close()
    return folder


def steps(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """What the loop logs at each step."""
    draw = random.Random(seed)
    return [
        {
            "step": step,
            "tokens": 96 * step,
            "train/loss": 8 * math.exp(-step / count) + draw.random() / 4,
            "train/skipped_steps": 0,
            "optim/grad_norm": 1 + draw.random(),
            "optim/lr_matrices": 0.003 * (1 - step / count),
            "optim/lr_table": 0.012 * (1 - step / count),
            "throughput/tokens_per_s": 4000 + 100 * draw.random(),
            "throughput/waiting_share": 0.001,
            "memory/peak_gb": 0.6,
            "time/step_s": 0.5,
            "time/unix_s": 1.8e9 + step,
        }
        for step in range(1, count + 1)
    ]


def validation(step: int, texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a validation logs."""
    return {
        "step": step,
        "tokens": 96 * step,
        "eval/loss": 5 - step / 100,
        "eval/bits_per_byte": 2 - step / 1000,
        **{f"eval/loss_{name}": value - step / 100 for name, value in (("files", 4.5), ("at_0000_0031", 5.5))},
        "eval/bits_per_byte_files": 2 - step / 1000,
        "eval/exact_files": 0.25,
        "samples/texts": list(texts),
    }


def look(step: int) -> dict[str, Any]:
    """What a look at the table's rows logs."""
    whole = {
        f"rows/norm_{name}": 1 + place + step / 100 for place, name in enumerate(("min", "p05", "p50", "p95", "max"))
    }
    by_class = {f"rows/norm_p50_{name}": 1 + place + step / 50 for place, name in enumerate(CLASSES)}
    return {
        "step": step,
        "tokens": 96 * step,
        **whole,
        **by_class,
        **{f"rows/count_{name}": 80 for name in CLASSES},
        "rows/anisotropy": 0.3,
        "rows/anisotropy_centred": 0.2,
        "rows/norm_histogram": {"counts": [1, step, 3], "edges": [0.0, 1.0, 2.0, 3.0], "nonfinite": 0},
    }


def full(count: int = 60, texts: tuple[str, ...] = ("the cat sat",)) -> list[dict[str, Any]]:
    """Steps, two validations and looks, in the order of their steps."""
    looks = [look(step) for step in range(10, count + 1, 10)]
    rows = [*steps(count), *looks, validation(count // 2, texts), validation(count, texts)]
    return sorted(rows, key=lambda row: row["step"])


EVIL = "</p></script><img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt; {{ 7 * 7 }} <!-- ]]>"
