"""stack.core.home: a process without a home, as a bare uid in a container has none."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
import tiny

from stack.core.home import home


def without_a_home() -> None:
    """No HOME, no USER, and no entry for the user in the system's list."""

    def nobody(_: object) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "MPLCONFIGDIR"):
        os.environ.pop(name, None)
    pwd.getpwuid = nobody  # type: ignore[assignment]  in a process of its own


@pytest.mark.parametrize("module", ["stack.train", "stack.chat", "stack.report", "stack.audit", "stack.plan"])
def test_every_command_works_without_a_home(tmp_path_factory: pytest.TempPathFactory, module: str) -> None:
    root = tmp_path_factory.getbasetemp() / "homeless"
    root.mkdir(exist_ok=True)
    if module != "stack.train" and not (root / "runs/tiny").exists():
        assert tiny.train(root).wait() == 0
    arguments = {
        "stack.train": tiny.settings(root, "name=homeless", "track.mode=auto", "track.report=true"),
        "stack.chat": [f"{root}/runs/tiny", "prompt=the cat", "tokens=2"],
        "stack.report": ["tiny", f"runs_dir={root}/runs"],
        "stack.audit": [f"{root}/runs/tiny"],
        "stack.plan": [],
    }[module]
    job = tiny.Job(_homeless, arguments, module, log=root / module)
    assert job.wait() == 0, job.output()
    said = job.output()
    assert "Traceback" not in said and "atplotlib" not in said
    assert module != "stack.train" or "wandb: offline" in said


def _homeless(arguments: list[str], module: str) -> None:
    without_a_home()
    tiny.command(arguments, module)


@pytest.mark.parametrize("kind", ["none there", "a file", "a folder"])
def test_a_home_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    own = tmp_path / "own"
    if kind == "a file":
        own.touch()
    if kind == "a folder":
        own.mkdir()
    monkeypatch.setenv("HOME", str(own))
    with home():
        found = Path(os.environ["HOME"])
        assert found.is_dir() and os.access(found, os.W_OK) and (found == own) == (kind == "a folder")
    assert os.environ["HOME"] == str(own) and (found == own or not found.exists())
