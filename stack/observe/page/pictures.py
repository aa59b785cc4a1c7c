"""Pictures of numbers as inline SVG that follows the page: matplotlib draws, the page's style sheet colours.

Every colour is a CSS custom property (``--s0`` … for series, ``--ink``, ``--muted``, ``--grid``, ``--page``), texts
stay texts in the font of the page, and nothing refers to anything outside: one drawing serves light, dark and print.
Widths are natural ones: a text of 12 units is 12 px where the picture is shown as wide as it says.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stack.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 6  # of series; from the seventh on they come again, dashed
SMALL, WIDE, TALL = (360.0, 210.0), (760.0, 380.0), (360.0, 270.0)  # natural sizes, in px
BINS = 100  # points that a long curve is drawn with
TEXT = 12.0  # size of every text, in px
_CHARACTER = 6.3  # mean width of one at that size
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_NAMES = {"ink": "#000001", "muted": "#000002", "grid": "#000003", "page": "#000004"} | {
    f"s{i}": f"#0000{16 + i:02x}" for i in range(COLOURS)
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stack",
    "text.parse_math": False,  # a source may be called $
    "font.size": TEXT,
    "axes.unicode_minus": True,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Line:
    """A curve: finite points of ``x`` and ``y``, with a gap where ``y`` is NaN."""

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0  # -1: none of its own
    bands: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # lowest and highest, as long as ``x``; outer ones first
    dots: bool = False


@dataclass(frozen=True)
class Histogram:
    """Counts between edges; one edge more than counts."""

    label: str
    counts: np.ndarray
    edges: np.ndarray
    colour: int = 0


def available() -> None:
    """Raises :class:`UserError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'stack-100m[report]'") from error


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A long curve in :data:`BINS` parts of equally many points: mean x, mean y, lowest and highest y of each part.

    Values that are not finite are left out of a part; a part of none is NaN. A short curve stays as it is.
    """
    if len(x) <= 2 * BINS:
        return x, y, y, y
    parts = np.array_split(np.arange(len(x)), BINS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a part without a finite value
        means, lows, highs = ([f(y[part]) for part in parts] for f in (np.nanmean, np.nanmin, np.nanmax))
    return np.array([x[part].mean() for part in parts]), np.array(means), np.array(lows), np.array(highs)


def curves(lines: Sequence[Line], size: tuple[float, float] = SMALL, *, zero: bool = False, log: bool = False) -> str:
    """Curves over one axis, each labelled at its end where there are several. ``zero``: the axis begins at 0."""
    labelled = len(lines) > 1
    longest = max(len(line.label) for line in lines) if labelled else 0
    with _axes(size, left=46, right=14 + min(_CHARACTER * longest, size[0] * 0.36)) as (ax, svg):
        for line in lines:
            _draw(ax, line)
        low, high = _range([v for line in lines for v in (line.y, *(b for band in line.bands for b in band))])
        if log:
            ax.set_yscale("log")
            ax.set_ylim(low / 1.3, high * 1.3)
        else:
            ax.set_ylim(0 if zero and low >= 0 else low - 0.04 * (high - low), high + 0.06 * (high - low))
        xs = np.concatenate([line.x for line in lines])
        ax.set_xlim(min(0.0, xs.min()) if xs.min() < 0.1 * xs.max() else xs.min(), xs.max() or 1.0)
        _scale(ax.xaxis, 4 if size[0] < 500 else 7)
        _scale(ax.yaxis, 5, log=log)
        if labelled:
            _label_ends(ax, lines, size)
    return svg[0]


def _draw(ax: Axes, line: Line) -> None:
    colour = _colour(line.colour)
    for low, high in line.bands:
        ax.fill_between(line.x, low, high, color=colour, alpha=0.17, linewidth=0, clip_on=False)
    alone = np.isfinite(line.y).sum() == 1
    if not line.dots or len(line.x) > 1:
        style = _DASHES[line.colour // COLOURS % len(_DASHES)]  # the last one where there is no colour
        ax.plot(line.x, line.y, color=colour, linewidth=1.6, linestyle=style, clip_on=False, solid_joinstyle="round")
    if line.dots or alone:
        few = len(line.x) <= 40
        ax.plot(line.x, line.y, "o", color=colour, markersize=6 if few else 3, markeredgecolor=_NAMES["page"],
                markeredgewidth=1.2 if few else 0, clip_on=False)  # fmt: skip


def _label_ends(ax: Axes, lines: Sequence[Line], size: tuple[float, float]) -> None:
    """Writes each label beside the last point of its curve, pushed apart where two would touch."""
    ends = []
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.y))
        if len(finite):
            ends.append((ax.transData.transform((line.x[finite[-1]], line.y[finite[-1]]))[1], line))
    ends.sort(key=lambda end: end[0])
    heights = spread([height for height, _ in ends], 1.12 * TEXT, low=ax.bbox.y0 + 4, high=ax.bbox.y1)
    for height, (_, line) in zip(heights, ends, strict=True):
        ax.figure.text((ax.bbox.x1 + 7) / size[0], height / size[1], shortened(line.label, int(size[0] * 0.36 / 6.3)),
                       color=_colour(line.colour), va="center_baseline")  # fmt: skip


def spread(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places moved as little as a sweep up and one down can, until neighbours stand ``gap`` apart.

    They stay between ``low`` and ``high`` as far as there is room.
    """
    found: list[float] = []
    for place in places:
        found.append(max(place, low, found[-1] + gap if found else low))
    top = high
    for i in reversed(range(len(found))):
        found[i] = min(found[i], top)
        top = found[i] - gap
    return found


def dots(names: Sequence[str], values: Sequence[Sequence[float]], texts: Sequence[str], *, unit: bool = False) -> str:
    """One row a name, one dot a run: ``values[run][row]``, NaN where a run has none.

    ``texts`` stand beside the dots of a single run. ``unit``: shares, on an axis from 0 to 1.
    """
    height = (22.0 + 5 * (len(values) - 1)) * len(names) + 34
    left = 14 + _CHARACTER * min(22, max(map(len, names)))
    with _axes((360.0, height), left=left, right=46) as (ax, svg):
        rows = np.arange(len(names))[::-1]
        low, high = (0.0, 1.0) if unit else _range([np.array(v, dtype=np.float64) for v in values])
        room = 0.0 if unit else 0.08 * (high - low)
        ax.set_xlim(low - room, high + room)
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.set_yticks(rows, [shortened(name, 22) for name in names])
        ax.grid(axis="y", color=_NAMES["grid"], linewidth=0.8)
        for run, of_run in enumerate(values):
            beside = rows + 0.5 * ((len(values) - 1) / 2 - run) / max(2, len(values))  # equal values hide nobody
            ax.plot(of_run, beside, "o", color=_colour(run), markersize=8, markeredgecolor=_NAMES["page"],
                    markeredgewidth=1.2, clip_on=False, zorder=3)  # fmt: skip
        if len(values) == 1:
            for row, value, text in zip(rows, values[0], texts, strict=True):
                if math.isfinite(value):
                    ax.annotate(text, (value, row), (9, 0), textcoords="offset points", color=_NAMES["ink"],
                                va="center_baseline")  # fmt: skip
        _scale(ax.xaxis, 4, percent=unit)
    return svg[0]


def stacks(names: Sequence[str], parts: Sequence[Sequence[tuple[int, float]]], texts: Sequence[str]) -> str:
    """Horizontal bars of parts, each ``(colour, length)`` with colour -1 for one that has none; a text at each end."""
    with _axes((360.0, 44.0 * len(names) + 30), left=14 + _CHARACTER * max(map(len, names)), right=52) as (ax, svg):
        rows = np.arange(len(names))[::-1]
        for row, bar, text in zip(rows, parts, texts, strict=True):
            at = 0.0
            for colour, length in bar:
                pale = colour < 0 or colour >= COLOURS
                ax.barh(row, length, left=at, height=0.62, color=_colour(colour), alpha=0.55 if pale else 1.0,
                        edgecolor=_NAMES["page"], linewidth=1.0)  # fmt: skip
                at += length
            ax.annotate(text, (at, row), (5, 0), textcoords="offset points", va="center_baseline", color=_NAMES["ink"])
        ax.set_yticks(rows, list(names))
        ax.set_xlim(0, max(sum(length for _, length in bar) for bar in parts) or 1.0)
        ax.set_ylim(-0.5, len(names) - 0.5)
        ax.grid(visible=False, axis="y")
        _scale(ax.xaxis, 4)
    return svg[0]


def histograms(found: Sequence[Histogram]) -> str:
    """The last one filled, those before it as outlines, over one axis from 0."""
    longest = max(len(h.label) for h in found)
    with _axes(SMALL, left=46, right=14 if len(found) == 1 else 20 + _CHARACTER * longest) as (ax, svg):
        for h in found:
            last = h is found[-1]
            ax.stairs(h.counts, h.edges, color=_colour(h.colour), linewidth=1.4, clip_on=False)
            if last:
                ax.stairs(h.counts, h.edges, color=_colour(h.colour), fill=True, alpha=0.25, linewidth=0)
        ax.set_ylim(0, max(float(h.counts.max(initial=0)) for h in found) * 1.06 or 1.0)
        ax.set_xlim(min(h.edges[0] for h in found), max(h.edges[-1] for h in found))
        _scale(ax.xaxis, 4)
        _scale(ax.yaxis, 4)
        if len(found) > 1:
            for i, h in enumerate(reversed(found)):
                ax.figure.text((ax.bbox.x1 + 8) / SMALL[0], (ax.bbox.y1 - 8 - 1.3 * TEXT * i) / SMALL[1], h.label,
                               color=_colour(h.colour))  # fmt: skip
    return svg[0]


def _colour(index: int) -> str:
    return _NAMES["muted"] if index < 0 else _NAMES[f"s{index % COLOURS}"]


def _range(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Lowest and highest finite value, apart from each other."""
    known = np.concatenate([np.ravel(v) for v in values])
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    room = abs(high) * 0.05 or 0.5
    return (low, high) if high - low > 1e-9 * abs(high) else (low - room, high + room)


def _scale(axis: Any, ticks: int, *, percent: bool = False, log: bool = False) -> None:
    """Few round ticks with short labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=ticks) if log else MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f}\u202f%" if percent else short(value)))


def short(value: float) -> str:
    """``1.5M``, ``20k``, ``0.003``: a number of at most three digits that count."""
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9999:
            return f"{value / size:.4g}{sign}"
    return re.sub(r"e([-+])0?", r"e\1", f"{value:.4g}")


def shortened(text: str, most: int) -> str:
    """A text of one line and at most ``most`` characters, without those that XML cannot hold."""
    plain = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return plain if len(plain) <= most else plain[: max(1, most - 1)] + "…"


@contextmanager
def _axes(size: tuple[float, float], left: float, right: float) -> Iterator[tuple[Axes, list[str]]]:
    """Bare axes to draw in; after the block the second item holds the SVG."""
    available()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    done: list[str] = []
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a glyph that matplotlib's own font lacks: the page's has it
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72)
        canvas = FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        bottom, top = 26.0, 10.0
        ax = figure.add_axes(
            (left / size[0], bottom / size[1], 1 - (left + right) / size[0], 1 - (bottom + top) / size[1])
        )
        ax.patch.set_visible(False)
        for side, spine in ax.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_NAMES["grid"])
        ax.tick_params(left=False, bottom=False, labelcolor=_NAMES["muted"], pad=5)
        ax.grid(axis="y", color=_NAMES["grid"], linewidth=0.8)
        ax.set_axisbelow(True)
        yield ax, done
        file = io.StringIO()
        canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    done.append(_clean(file.getvalue()))


_REFERENCE = re.compile(r"#([\w-]+)")
_NUMBER = re.compile(r"-?\d+\.\d+")
_PLAIN = re.compile(r"font-family:[^;]*;?\s*")
_HEX = re.compile(r"#0000(?:0[1-4]|1[0-9a-f])\b")
_VARIABLES = {code: f"var(--{name})" for name, code in _NAMES.items()}


def _clean(text: str) -> str:
    """matplotlib's file as an element of a page: no header, no style of its own, colours by name, short numbers."""
    root = ET.fromstring(text)
    used = {
        match[1]
        for element in root.iter()
        for key, value in element.attrib.items()
        if key.endswith("href") or "url(" in value
        for match in [_REFERENCE.search(value)]
        if match
    }
    for parent in root.iter():
        for child in [c for c in parent if c.tag.endswith("}style") or c.tag.endswith("}metadata")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rsplit("}", 1)[-1]
        element.text = (element.text or "").strip() if element.tag != "text" else element.text
        element.tail = None
        attributes = dict(element.attrib)
        element.attrib.clear()
        for key, value in attributes.items():
            kept = _attribute(key.rsplit("}", 1)[-1], value, used)
            if kept is not None:
                element.set(key.rsplit("}", 1)[-1], kept)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    return ET.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, used: set[str]) -> str | None:
    if key == "id" and value not in used:
        return None
    if key == "transform" and re.match(r"rotate\(-?0 ", value):
        return None
    if key == "style":
        return _HEX.sub(lambda match: _VARIABLES[match[0]], _PLAIN.sub("", value)) or None
    if key in ("d", "x", "y", "points", "transform"):
        value = _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
        return value.replace("\n", "") if key == "d" else value
    return value


def titled(svg: str, name: str, title: str, description: str) -> str:
    """The picture with its title and description for those who do not see it; ``name`` is unique on the page."""
    root = ET.fromstring(svg)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == "href" or "url(#" in value:
                element.set(key, value.replace("#", f"#{name}-", 1))
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-t {name}-d")
    root.set("preserveAspectRatio", "xMinYMin meet")
    for at, (tag, key, text) in enumerate((("title", "t", title), ("desc", "d", description))):
        element = ET.Element(tag, {"id": f"{name}-{key}"})
        element.text = shortened(text, 500)
        root.insert(at, element)
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)
