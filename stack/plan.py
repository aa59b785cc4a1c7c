"""``python -m stack.plan``: what a training run would take on a stated machine, or on this one. Trains nothing."""

from __future__ import annotations

import dataclasses

from stack.config.entry import entry
from stack.config.schema import Planned
from stack.core import machine
from stack.observe import plan


def run(config: Planned) -> int:
    """The whole of ``stack.plan``; returns the exit code."""
    here = config.plan.device is None
    device = machine.choose_device(config.device) if here else str(config.plan.device)
    if not here and config.precision == "auto":  # of a machine that need not be this one
        config = dataclasses.replace(config, precision="bf16" if device == "cuda" else "float32")
    print("\n".join(plan.lines(config, device)))
    return 0


main = entry("plan", Planned, run, compare=lambda jobs: None)  # each plan has been printed

if __name__ == "__main__":
    main()
