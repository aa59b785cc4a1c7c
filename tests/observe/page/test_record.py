"""stack.observe.page.record: a run is read back whole, and what is wrong with it is said while the rest is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import page_runs
import pytest
import safetensors.numpy
import tiny

from stack.core.errors import UserError
from stack.observe.page import record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with two checkpoints, trained for real."""
    root = tmp_path_factory.mktemp("record")
    assert tiny.run(tiny.configure(*tiny.settings(root, "checkpoint.every=3"))) == 0
    return root / "runs/tiny"


def test_a_run_is_read_back(trained: Path) -> None:
    run = record.read(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in lines if "train/loss" in row]
    assert run.warnings == []
    assert run.step == run.steps == 6 and run.tokens == lines[-1]["tokens"]
    found = run.series("train/loss")
    assert found.value.tolist() == losses and found.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.last("eval/loss") == lines[-1]["eval/loss"]
    assert list(run.manifests) == ["step-00000003", "step-00000006"]
    weights = safetensors.numpy.load_file(trained / "checkpoints/step-00000006/model.safetensors")
    table = weights["model.embed_tokens.weight"].size
    assert run.parameters() == (sum(x.size for x in weights.values()), table)


def test_what_is_damaged_is_told_and_the_rest_is_shown(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(trained, folder)
    weights = folder / "checkpoints/step-00000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "metrics.discarded.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    (folder / "checkpoints.discarded-1/step-00000009").mkdir(parents=True)
    (folder / "audit.json").write_text("{")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "tok')
    run = record.read(folder)
    told = "\n".join(run.warnings)
    for part in ("1 line cannot be read", "damaged checkpoint step-00000003", "expected", "2 rows written after",
                 "step-00000009", "audit.json cannot be read"):  # fmt: skip
        assert part in told
    assert len(run.warnings) == 5
    assert run.step == 6 and list(run.manifests) == ["step-00000006"]


def test_values_that_are_not_finite_and_counts_of_trouble_are_told(tmp_path: Path) -> None:
    rows = page_runs.steps(4)
    rows[1]["train/loss"], rows[2]["optim/grad_norm"] = float("nan"), float("-inf")
    for row in rows[1:]:
        row["train/skipped_steps"] = row["time/tracking_failures"] = 2
        row["throughput/waiting_share"] = 0.4
    run = record.read(page_runs.write(tmp_path, "ill", rows, "train.steps=9"))
    told = "\n".join(run.warnings)
    for part in ("2 steps skipped", "train/loss: 1 value not finite, first at step 2",
                 "time/tracking_failures ended at 2", "optim/grad_norm: 1 value not finite, first at step 3",
                 "more than 40 %", "step 4 of 9"):  # fmt: skip
        assert part in told
    assert len(run.warnings) == 6
    assert np.isnan(run.series("train/loss").value).tolist() == [False, True, False, False]


def test_rows_that_are_missing_or_twice_are_told(tmp_path: Path) -> None:
    rows = page_runs.steps(8)
    gap = record.read(page_runs.write(tmp_path, "gap", rows[:3] + rows[5:], "train.steps=8"))
    twice = record.read(page_runs.write(tmp_path, "twice", rows[:5] + rows[3:], "train.steps=8"))
    sparse = record.read(page_runs.write(tmp_path, "sparse", [*rows[2::3], rows[7]], "train.steps=8", "track.every=3"))
    assert gap.warnings == ["metrics.jsonl jumps between rows: step 3 to 6"]
    assert twice.warnings == ["metrics.jsonl jumps between rows: step 5 to 4"]
    assert sparse.warnings == []


def test_an_audit_is_read_in_its_order() -> None:
    near = [{"id": 3, "text": "b", "cosine": 0.987}, {"id": 4, "text": None, "cosine": 0.5}]
    row = {
        "id": 7,
        "text": " a",
        "occurrences": 0,
        "norm": 1.5,
        "distance": 0.01,
        "nearest": near,
        "known_unused": False,
    }
    listed = [row | {"id": 9, "known_unused": True}, row, row | {"id": 2, "occurrences": None}]
    found = record.audit_rows({"indicator": "distance", "listed": listed})
    assert [(r.id, r.token, r.occurrences, r.indicator) for r in found] == [
        (7, '" a"', 0, 0.01),
        (2, '" a"', None, 0.01),
    ]
    assert found[0].nearest == '0.99 "b"  0.50 (none)'


def test_no_run_is_an_error_with_the_runs_that_are_there(tmp_path: Path) -> None:
    page_runs.write(tmp_path, "one", [])
    with pytest.raises(UserError, match=r"runs/two: there is no run .*: one"):
        record.read(tmp_path / "runs/two")
