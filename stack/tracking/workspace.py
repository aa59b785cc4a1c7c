"""The wandb workspace of this program's runs, as code.

A section of the workspace is a section of ``metrics.jsonl``. Panels name their metrics by a pattern or by exact keys,
so that a source, a class of rows or a parameter group that only some runs have needs no panel of its own. Online the
workspace is created by wandb-workspaces; otherwise its specification, the JSON that the server would get, is written.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stack.config.schema import Dashboard
from stack.core.errors import UserError
from stack.tracking.metrics import MEASURED

if TYPE_CHECKING:
    import wandb_workspaces.workspaces as ws


@dataclass(frozen=True)
class Panel:
    """One panel: the metrics that it shows, by a pattern (RE2, searched in the key) or by exact keys."""

    title: str
    pattern: str = ""
    keys: tuple[str, ...] = ()
    kind: Literal["line", "scalar", "table"] = "line"
    log_y: bool = False

    def shows(self, key: str) -> bool:
        """Whether a metric is on the panel."""
        return key in self.keys or bool(self.pattern and re.search(self.pattern, key))


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "eval": (
        Panel("bits per byte", keys=("eval/bits_per_byte",)),
        Panel("nats per token", keys=("eval/loss",)),
        Panel("held-out answers, share right", "^eval/(stopped|exact|form)_"),
        Panel("bits per byte by source", "^eval/bits_per_byte_"),
        Panel("nats per token by position in the window", "^eval/loss_at_"),
        Panel("nats per token by length of document", "^eval/loss_length_"),
        Panel("nats per token by class of row", "^eval/loss_class_"),
        Panel("nats per token, all parts", "^eval/loss_"),
    ),
    "train": (
        Panel("nats per supervised token", keys=("train/loss",)),
        Panel("steps skipped", keys=("train/skipped_steps",)),
    ),
    "optim": (
        Panel("gradient norm before clipping", keys=("optim/grad_norm",), log_y=True),
        Panel("learning rates", "^optim/lr_"),
    ),
    "rows": (
        Panel("norm, quantiles over all rows", "^rows/norm_(min|p[0-9]+|max)$"),
        Panel("norm, median by class", "^rows/norm_p50_"),
        Panel("norm, histogram", keys=("rows/norm_histogram",)),
        Panel("norm of the mean row", keys=("rows/mean_norm",)),
        Panel("anisotropy", "^rows/anisotropy"),
        Panel("distance from the mean row", "^rows/distance_"),
        Panel("gradient by path", "^rows/grad_(input|output)_norm$", log_y=True),
        Panel("gradient rows, input path", "^rows/grad_input_(mean|p50|max)", log_y=True),
        Panel("gradient rows, output path", "^rows/grad_output_(mean|p50|max)", log_y=True),
        Panel("gradient rows, output path, log10, histogram", keys=("rows/grad_output_histogram",)),
        Panel("second moments", "^rows/second_moment_", log_y=True),
        Panel("update to row", "^rows/update_ratio_", log_y=True),
        Panel("rows never updated, never read", "^rows/never_"),
        Panel("softmax mass by class", "^rows/mass_", log_y=True),
        Panel("rows by class", "^rows/count_"),
        Panel("norm, all quantiles by class", "^rows/norm_(min|p[0-9]+|max)_"),
        Panel("not finite", "_nonfinite$"),
    ),
    "memory": (Panel("GB", "^memory/"),),
    "throughput": (
        Panel("tokens per second", keys=("throughput/tokens_per_s",)),
        Panel("shares", "^throughput/.*(share|mfu)"),
    ),
    "time": (
        Panel("seconds", "^time/.*_s$"),
        Panel("failures of tracking", keys=("time/tracking_failures",)),
    ),
    "growth": (
        *(Panel(name, keys=(f"growth/{name}",), kind="scalar") for name in ("kl", "bound", "mass")),
        Panel("rows and positions", "^growth/(.*rows|kept|initialized|live|positions)$"),
    ),
    "samples": (Panel("texts", keys=("samples/texts",), kind="table"),),
}
OPEN = ("eval", "train", "rows", "growth", "samples")


def create(config: Dashboard) -> str:
    """Saves the workspace on the server and returns its address."""
    import wandb

    try:
        made = workspace(config, config.track.entity or wandb.Api().default_entity)
        made.save()
    except (wandb.Error, ValueError, OSError) as error:
        raise UserError(f"the workspace cannot be created: {error}; track.mode=offline writes it to a file") from error
    return made.url


def workspace(config: Dashboard, entity: str) -> ws.Workspace:
    """The workspace, not yet saved."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.workspaces as ws

    sections = []
    for name, panels in SECTIONS.items():
        axis = "step" if f"{name}/" in MEASURED else "tokens"
        drawn = [_panel(panel, axis) for panel in panels]
        layout = ws.SectionPanelSettings(x_axis=axis)
        sections.append(ws.Section(name=name, panels=drawn, is_open=name in OPEN, panel_settings=layout))
    return ws.Workspace(
        entity=entity,
        project=config.track.project,
        name=config.name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="tokens", group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(groupby=[expr.Config(key) for key in config.group_by]),
        auto_generate_panels=True,  # for a metric that a later version adds
    )


def _panel(panel: Panel, axis: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "scalar":
        return wr.ScalarChart(title=panel.title, metric=panel.keys[0])
    if panel.kind == "table":
        return wr.WeavePanelSummaryTable(table_name=panel.keys[0])
    which: dict[str, Any] = {"metric_regex": panel.pattern} if panel.pattern else {"y": list(panel.keys)}
    return wr.LinePlot(title=panel.title, x=axis, log_y=panel.log_y or None, **which)


def specification(made: ws.Workspace) -> dict[str, Any]:
    """What the server would get, as JSON values; equal for equal workspaces, as the random ids are replaced."""
    return _named(made._to_model().model_dump(mode="json", by_alias=True, exclude_none=True), "")


def _named(value: Any, path: str) -> Any:
    """With every random id replaced by one that follows from where it stands."""
    if isinstance(value, dict):
        ids = {
            key: hashlib.sha256(f"{path}/{key}".encode()).hexdigest()[:12] for key in ("__id__", "id") if key in value
        }
        return {key: _named(entry, f"{path}/{key}") for key, entry in value.items()} | ids
    if isinstance(value, list):
        return [_named(entry, f"{path}/{number}") for number, entry in enumerate(value)]
    return value
