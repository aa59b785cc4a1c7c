"""Runs of older versions go on: what their files lack has the value by which those versions behaved."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import old_runs
import pytest
import tiny
import yaml

from stack import checkpoint, job
from stack.config import continuing
from stack.config.checks import keys_at, typed
from stack.config.continuing import befores, flatten
from stack.config.kinds import may_change
from stack.config.schema import plain
from stack.core.errors import UserError
from stack.observe.page import page
from stack.training import run_folder
from stack.training.restore import state_of
from stack.training.state import State

RUNS = [(old_runs.OLDER, "tiny"), (old_runs.OLD, "tiny"), (old_runs.OLD, "talk")]
# The settings of a source in the first version that is kept here: its runs name no source, so they cannot tell.
OF_A_SOURCE = {"files", "hub", "text", "weight", "max_mb", "check", "headings"}
OF_A_HUB_SET = {"path", "name", "split", "revision", "streaming"}
WHAT_TO_DO = (
    "a run of an older version could not go on: mark these in the schema with Before(VALUE), the value by which a "
    "version without it behaved; or with MayChange, if it may change between two starts of a run"
)


@pytest.mark.parametrize(("commit", "run"), RUNS)
def test_an_old_run_goes_on_as_its_own_version_did(
    commit: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(old_runs.copy(commit, tmp_path / "project"))
    folder = Path("runs") / run
    then = old_runs.losses(folder)
    assert list(then) == [1, 2, 3, 4, 5, 6]
    assert old_runs.go_on(run) == 0
    assert f"going on from {folder}/checkpoints/step-00000003: step 3 of 6" in capsys.readouterr().out
    assert old_runs.losses(folder) == pytest.approx(then, rel=1e-4)  # the processor may be another one
    checkpoint.verify(folder / "checkpoints/step-00000006")
    assert old_runs.go_on(run) == 0
    assert "finished already: step 6 of 6" in capsys.readouterr().out


def lacking(values: dict, config: object) -> list[str]:
    """The settings of today that neither ``config.yaml`` nor ``Before`` has a value for, but for free ones."""
    known = flatten(values).keys()
    return [key for key in flatten(plain(config)) if key not in known and not may_change(type(config), key)]


@pytest.mark.parametrize(("commit", "run"), RUNS)
def test_what_an_old_config_lacks_has_the_value_that_the_old_version_behaved_by(commit: str, run: str) -> None:
    saved = run_folder.read_config(old_runs.HERE / commit / "runs" / run)
    assert saved is not None
    missing = lacking(saved, old_runs.configure(run))
    assert not missing, f"{missing}: {WHAT_TO_DO}"
    # The test would notice a new one.
    del saved["train"]["z_loss"]
    assert lacking(saved, old_runs.configure(run)) == ["train.z_loss"]


@pytest.mark.parametrize("group", ["data", "chat"])
def test_what_an_old_source_lacks_has_a_value_too(group: str) -> None:
    schema = type(old_runs.configure("tiny" if group == "data" else "talk"))
    path = [group, "sources", "*"]
    found = {f"{group}.sources.*.{key}" for key in keys_at(path, schema) if key not in OF_A_SOURCE}
    found |= {f"{group}.sources.*.hub.{key}" for key in keys_at([*path, "hub"], schema) if key not in OF_A_HUB_SET}
    known = befores(schema).keys()
    assert found and not found - known, f"{sorted(found - known)}: {WHAT_TO_DO}"


def test_every_value_of_before_is_one_that_its_setting_takes() -> None:
    for run in ("tiny", "talk"):
        config = old_runs.configure(run)
        for key, value in befores(type(config)).items():
            if "*" not in key:
                values = plain(config)
                *path, last = key.split(".")
                functools.reduce(dict.__getitem__, path, values)[last] = value
                assert flatten(plain(typed(values, type(config))))[key] == value


def test_a_missing_setting_is_compared_by_how_its_lack_behaved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = old_runs.copy(old_runs.OLD, tmp_path / "project") / "runs/tiny"
    monkeypatch.chdir(tmp_path / "project")
    values = yaml.safe_load((folder / "config.yaml").read_text())
    z_loss = values["train"].pop("z_loss")
    values["data"]["sources"] = {"a": {"files": ["a.txt"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"train.z_loss: the run has no such setting, now asked for 0.0"):
        run_folder.start_of(folder, old_runs.configure("tiny", "data.files=[corpus.jsonl]"), print)
    monkeypatch.setattr(continuing, "befores", lambda schema: befores(schema) | {"train.z_loss": z_loss})
    saved = run_folder.read_config(folder)
    assert saved is not None and saved["train"]["z_loss"] == z_loss
    assert saved["data"]["sources"] == {"a": {"files": ["a.txt"], "validation": None}} and "chat" not in saved
    values["data"]["sources"] = {}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    assert run_folder.start_of(folder, old_runs.configure("tiny"), print).step == 3
    with pytest.raises(UserError, match=r"train.z_loss: the run has 0.0, now asked for 0.5"):
        run_folder.start_of(folder, old_runs.configure("tiny", "train.z_loss=0.5"), print)


def test_a_setting_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = old_runs.copy(old_runs.OLD, tmp_path / "project") / "runs/tiny"
    monkeypatch.chdir(tmp_path / "project")
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("train:\n", "lost:\n  a: {b: 1}\ntrain:\n  warm: 3\n", 1))
    told: list[str] = []
    assert run_folder.start_of(folder, old_runs.configure("tiny"), told.append).step == 3
    (line,) = told
    assert line.endswith("settings that this version does not know, and goes on without: lost.a.b=1, train.warm=3")


def test_sources_that_changed_are_changes_and_not_settings_that_are_gone(tmp_path: Path) -> None:
    folder = old_runs.copy(old_runs.OLD, tmp_path / "project") / "runs/tiny"
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("  sources: {}\n", "  sources: {my.own: {files: [a.txt], hub: null}}\n"))
    with pytest.raises(UserError, match=r"data\.sources\.my\.own\.files: the run has \['a.txt'\], now asked for None"):
        run_folder.start_of(folder, old_runs.configure("tiny"), print)


def test_the_page_of_an_old_run_shows_what_it_lacks(tmp_path: Path) -> None:
    text = page.html([page.record.read(old_runs.HERE / old_runs.OLDER / "runs/tiny")])
    assert re.search(r"diagnostics.rows_every\D*0\b", text)


def test_the_state_of_an_older_version_loads_and_that_of_a_newer_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(old_runs.copy(old_runs.OLDER, tmp_path / "project"))
    c = old_runs.configure("tiny")
    bench = tiny.trainer(c)
    begun = bench.begin(run_folder.start_of(bench.folder, c, print))
    assert begun.start_step == 3 and "seen" not in begun.saved
    hooks = job.hooks_of(bench.job, bench.made, begun, None).all
    where = f"{bench.job.start.checkpoint}/{checkpoint.STATE}"
    assert state_of(begun.saved, hooks, where) == State(3, begun.saved["tokens"])
    with pytest.raises(UserError, match=r"training/state.json holds later, which this version does not know; a newer"):
        state_of(begun.saved | {"later": 1}, hooks, where)


def test_a_manifest_of_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    folder = old_runs.copy(old_runs.OLD, tmp_path / "project") / "runs/tiny/checkpoints/step-00000003"
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"later": 1}))
    assert checkpoint.verify(folder).step == 3  # a key more is no other format
    path.write_text(json.dumps(manifest | {"format": checkpoint.FORMAT + 1}))
    with pytest.raises(UserError, match=r"manifest.json: format 2, which a newer version .* reads format 1"):
        checkpoint.verify(folder)
