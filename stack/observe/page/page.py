"""One self-contained page from runs: no network, no script, and texts of others are texts.

Jinja2 writes it with autoescaping on; the only markup that is passed through is the pictures', which is made here. A
content security policy in the page forbids it to load or run anything, whatever a sample says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stack.core import files
from stack.observe.page import facts, figures, learning, memory, pictures, record, rows
from stack.observe.page.parts import Picture, Section, Table
from stack.observe.page.record import Record

NAME = "report.html"  # in a run's folder
MOST_WARNINGS = 20

SECTIONS: tuple[Callable[[Sequence[Record]], Section], ...] = (
    facts.differences,
    learning.quality,
    facts.samples,
    rows.table_rows,
    rows.audit,
    facts.growth,
    learning.training,
    memory.memory,
    facts.settings,
    facts.going_on,
)


def write(folders: Sequence[Path], out: Path) -> Path:
    """Reads the runs in ``folders`` and writes the page ``out``, whole or not at all; returns ``out``.

    Raises:
        UserError: a folder is no run, or there is no matplotlib.
        OSError: ``out`` cannot be written.
    """
    pictures.available()
    text = html([record.read(folder) for folder in folders])
    out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(out, text)
    return out


def html(runs: Sequence[Record]) -> str:
    """The page of one run, or of several side by side."""
    environment = Environment(
        loader=PackageLoader("stack.observe.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"seen": seen, "titled": _titled, "swatch": _swatch}
    return environment.get_template("page.html").render(
        title=", ".join(seen(run.name) for run in runs),
        facts=_facts(runs),
        ended=facts.last_step(runs[0]) if len(runs) == 1 else None,
        runs=[{"folder": str(run.folder), "figures": figures.figures(run)} for run in runs],
        compared=_compared(runs),
        main=learning.main_curve(runs),
        warnings=_warnings(runs),
        sections=[section for make in SECTIONS if (section := make(runs))],
    )


def seen(text: Any) -> str:
    """A text with its control characters made visible, which a browser would drop or change."""
    return "".join(_SEEN.get(ord(c), c) for c in str(text))


# Control pictures for C0 without line feed and tab; one mark for the rest of what HTML cannot hold as it is.
_SEEN = {i: chr(0x2400 + i) for i in range(0x20) if chr(i) not in "\n\t"} | {0x7F: "\u2421"}
_SEEN |= dict.fromkeys((*range(128, 160), *range(55296, 57344), 65534, 65535), "�")


def _titled(svg: str, name: str, picture: Picture) -> Markup:
    return Markup(pictures.titled(svg, name, picture.title, picture.description))


def _swatch(colour: int) -> str:
    """The style of a small square in the colour of a series or a part; -1 has none of its own."""
    if colour < 0:
        return "background: var(--muted); opacity: .55"
    return f"background: var(--s{colour % pictures.COLOURS}); opacity: {0.55 if colour >= pictures.COLOURS else 1}"


def _facts(runs: Sequence[Record]) -> list[str]:
    """What the runs are: one line for all that are alike, with their names where there are several."""
    alike: dict[str, list[str]] = {}
    for run in runs:
        alike.setdefault(_describe(run), []).append(run.name)
    return [f"{', '.join(names)}: {line}" if len(alike) > 1 else line for line, names in alike.items()]


def _describe(run: Record) -> str:
    """What the run is, in a line."""
    config, parts = run.config, []
    if (sizes := run.parameters()) is not None:
        total, table = sizes
        parts.append(f"{total:,} parameters, {100 * table / total:.1f} % in a table of {run.newest[1].num_rows:,} rows")
    group = config.get("chat") or config.get("data") or {}
    if group:
        names = ", ".join(group.get("sources") or {}) if not group.get("files") else ""
        parts.append(f"{'fine-tuned' if 'base' in config else 'trained'} on {group.get('name')}"
                     + (f" ({names})" if names else ""))  # fmt: skip
    if config.get("base"):
        parts.append(f"from {config['base']}")
    parts.append(f"{run.resolved.get('device', '')}, {str(run.resolved.get('dtype', '')).removeprefix('torch.')}")
    return " · ".join(parts)


def _compared(runs: Sequence[Record]) -> Table:
    """The five figures, one column a run."""
    found = [{f"{f.name}, {f.unit}".removesuffix(", "): f.value for f in figures.figures(run)} for run in runs]
    names = dict.fromkeys(name for of_run in found for name in of_run)
    rows = [(name, *(of_run.get(name, "—") for of_run in found)) for name in names]
    return Table(("", *(run.name for run in runs)), rows)


def _warnings(runs: Sequence[Record]) -> list[str]:
    found = [f"{run.name}: {line}" if len(runs) > 1 else line for run in runs for line in run.warnings]
    more = len(found) - MOST_WARNINGS
    return found[:MOST_WARNINGS] + ([f"and {more} more"] if more > 0 else [])
