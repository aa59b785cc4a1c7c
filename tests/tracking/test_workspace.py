"""stack.dashboard: a workspace with every section, written where there is no server, and equal each time.

That it shows every metric of a real run is tested beside that run, in test_wandb_run.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from hydra import compose, initialize_config_dir
from wandb_workspaces.workspaces import Workspace, internal

from stack.config import schema as config
from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.tracking import workspace

SECTIONS = ["eval", "train", "optim", "rows", "memory", "throughput", "time", "growth", "samples"]


def configure(*arguments: str) -> config.Dashboard:
    with initialize_config_dir(CONF, version_base="1.3"):
        return typed(compose("dashboard", overrides=list(arguments)), config.Dashboard)


def made(*arguments: str) -> dict[str, Any]:
    return workspace.specification(workspace.workspace(configure(*arguments), "me"))


def panels(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections if section["panels"]}


def test_sections_panels_and_axes() -> None:
    found = panels(made())
    assert list(found) == SECTIONS
    for name, wanted in workspace.SECTIONS.items():
        assert len(found[name]) == len(wanted)
        for panel, want in zip(found[name], wanted, strict=True):
            settings = panel["config"]
            if want.kind == "line":
                axis = "step" if name in ("memory", "throughput", "time") else "tokens"
                assert (settings["chartTitle"], settings["xAxis"]) == (want.title, axis)
                assert (settings.get("metricRegex", ""), tuple(settings["metrics"])) == (want.pattern, want.keys)
            assert all(key.startswith(f"{name}/") for key in want.keys)
    assert "samples/texts" in json.dumps(found["samples"])


def test_patterns_are_such_as_the_server_takes() -> None:
    """RE2 has neither lookaround nor references back."""
    for panel in (panel for section in workspace.SECTIONS.values() for panel in section):
        assert bool(panel.pattern) != bool(panel.keys)
        re.compile(panel.pattern)
        assert not re.search(r"\(\?|\\\d", panel.pattern)


def test_it_is_equal_each_time_and_read_back_whole() -> None:
    found = made()
    assert found == made() and found != made("name=Another")
    again = Workspace._from_model(internal.View.model_validate(found))
    assert [section.name for section in again.sections if section.panels] == SECTIONS
    assert again.settings.x_axis == "tokens" and again.runset_settings.groupby[0].name == "resolved.identity.packed"
    assert not Workspace._from_model(internal.View.model_validate(made("group_by=[]"))).runset_settings.groupby


def test_without_a_key_it_is_written_and_an_online_mode_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "below/dashboard.json"
    command = ("stack.dashboard", [f"file={file}", "track.project=mine"])
    job = tiny.Job(tiny.without_a_key, str(tmp_path), *command, log=tmp_path / "log")
    assert job.wait() == 0, job.output()
    assert re.fullmatch(rf"offline, as there is no key for \S+: the workspace is written to {file}\n", job.output())
    assert list(panels(json.loads(file.read_text()))) == SECTIONS
    assert json.loads(file.read_text())["project"] == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["below", "log"]
    command = ("stack.dashboard", [f"file={tmp_path}/none.json", "track.mode=online"])
    job = tiny.Job(tiny.without_a_key, str(tmp_path), *command, log=tmp_path / "online")
    assert job.wait() == 2 and job.output().startswith("error: track.mode=online, but there is no key for")
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    "key", ["eval/loss_class_rare", "rows/norm_p50_added", "rows/grad_input_norm", "eval/exact_add"]
)
def test_metrics_that_only_some_runs_have_are_shown(key: str) -> None:
    assert any(panel.shows(key) for panel in workspace.SECTIONS[key.split("/")[0]])
