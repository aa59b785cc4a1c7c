"""``python -m stack.dashboard``: the wandb workspace of this program's runs, made online or written to a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from stack.config.entry import entry
from stack.config.schema import Dashboard
from stack.core.errors import UserError
from stack.tracking.wandb_mode import decide
from stack.tracking.workspace import create, specification, workspace


def run(config: Dashboard) -> int:
    """The whole of ``stack.dashboard``; returns the exit code."""
    try:
        import wandb_workspaces  # noqa: F401  an extra
    except ImportError as error:
        raise UserError(f"{error}; install it with: pip install 'stack-100m[report]'") from error
    with tempfile.TemporaryDirectory() as logs:
        mode, why = decide(config.track, Path(logs), print)
        if mode == "online":
            print(create(config))
            return 0
    file = Path(config.file)
    text = json.dumps(specification(workspace(config, config.track.entity or "")), indent=1, sort_keys=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
    print(f"{mode}{', ' + why if why else ''}: the workspace is written to {file}")
    return 0


main = entry("dashboard", Dashboard, run)

if __name__ == "__main__":
    main()
