"""``python -m stack.audit``: lists the undertrained tokens of a checkpoint, ours or other people's, tied or not."""

from __future__ import annotations

import sys
from pathlib import Path

from stack.config.entry import entry
from stack.config.schema import Audit
from stack.core.errors import UserError
from stack.core.files import json_bytes
from stack.observe import audit_table
from stack.observe.audit import audit


def run(config: Audit) -> int:
    """The whole of ``stack.audit``; returns the exit code."""
    found = audit(config.checkpoint, config.counts, config.unused, config.top, config.runs_dir, show=_note)
    text = json_bytes(found).decode()
    sys.stdout.reconfigure(encoding="utf-8")
    if config.json == "-":
        sys.stdout.write(text)
        return 0
    if config.json is not None:
        try:
            Path(config.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"json={config.json}: cannot be written ({error.strerror}); give another path") from error
    audit_table.show(found)
    return 0


def _note(line: str) -> None:
    """Says something that is no part of the result."""
    print(line, file=sys.stderr, flush=True)


main = entry("audit", Audit, run, positional="checkpoint")

if __name__ == "__main__":
    main()
