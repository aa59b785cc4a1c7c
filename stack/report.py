"""``python -m stack.report``: a page to look at, from one run or from several side by side."""

from __future__ import annotations

from pathlib import Path

from stack.config.entry import entry
from stack.config.schema import Report
from stack.core.errors import UserError
from stack.observe.page import page
from stack.training import run_folder


def run(config: Report) -> int:
    """The whole of ``stack.report``; returns the exit code."""
    folders = [_folder(name, Path(config.runs_dir)) for name in config.runs]
    alone = folders[0] / page.NAME if len(folders) == 1 else Path(config.runs_dir) / page.NAME
    out = page.write(folders, alone if config.out is None else Path(config.out))
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    return 0


def _folder(name: str, runs_dir: Path) -> Path:
    """A run by its folder or by its name."""
    for folder in (Path(name), runs_dir / name):
        if (folder / "config.yaml").is_file():
            return folder
    known = run_folder.names(runs_dir)
    raise UserError(f"runs: there is no run {name!r}, neither as a folder nor in {runs_dir}; runs there: {known}")


main = entry("report", Report, run, positional="runs")

if __name__ == "__main__":
    main()
