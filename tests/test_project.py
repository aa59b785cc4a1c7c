"""The project as it is installed: the configurations travel inside the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_wheel_composes_its_own_configuration(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("stack", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "stack/conf/train.yaml").is_file() and not (site / "conf").exists()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import stack; print(stack.__file__); from stack.train import main; main()",
            "--cfg",
            "job",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(site) in done.stdout and "vocab_size: 4096" in done.stdout
