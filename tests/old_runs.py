"""Copies of the run folders of older versions below ``tests/old_runs``, and the commands that made them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import Config, FineTune

HERE = Path(__file__).parent / "old_runs"
OLDER, OLD = "c6aa0d1", "5b4a0e0"  # commits
ALL = (
    *("device=cpu", "compile=off", "precision=float32", "train.micro_batch=1", "sample.tokens=4", "checkpoint.every=3"),
    *("track.mode=disabled", "track.report=false", "train.window=32", "train.global_batch=2", "train.steps=6"),
)
TINY = (
    *("name=tiny", "data=none", "data.files=[corpus.jsonl]", "data.validation=0.3", "data.workers=1"),
    *("tokenizer.vocab_size=320", "model.layers=1", "model.d=8", "model.heads=2", "model.kv_heads=1"),
    *("model.head_dim=4", "model.ffn=16", "model.context=64", "model.zero_init=false", "schedule.warmup=2"),
    *("sample.prompts=[the]", "diagnostics.rows_every=3", *ALL),
)
TALK = (
    *("name=talk", "base=runs/tiny", "chat=none", "chat.files=[talk.jsonl]", "chat.validation=0.3", "chat.workers=1"),
    *("sft.answers=2", "sft.answer_tokens=4", "sft.replay=0.3", "sample.prompts=[say the cat]"),
    *("diagnostics.rows_every=3", *ALL),
)
COMMANDS = {"tiny": ("train", Config, TINY), "talk": ("sft", FineTune, TALK)}


def copy(commit: str, to: Path) -> Path:
    """The project folder of a version: text, ``data`` and ``runs``."""
    return Path(shutil.copytree(HERE / commit, to))


def configure(run: str, *more: str) -> Config | FineTune:
    """Today's configuration of the command that made a run; ``more`` overrides."""
    name, schema, own = COMMANDS[run]
    new = [argument.split("=", 1)[0] for argument in more]
    kept = [argument for argument in own if argument.split("=", 1)[0] not in new]
    with initialize_config_dir(CONF, version_base="1.3"):
        return typed(compose(name, overrides=[*kept, *more]), schema)


def go_on(run: str, *more: str) -> int:
    """The command once more, in this process and in the current folder; the exit code."""
    return importlib.import_module(f"stack.{COMMANDS[run][0]}").run(configure(run, *more))


def losses(run: Path) -> dict[int, float]:
    """The training loss of every step in ``metrics.jsonl``."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
