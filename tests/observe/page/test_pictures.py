"""stack.observe.page.pictures: what is drawn is what the numbers say, in the colours of the page, for every eye."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.observe.page import pictures
from stack.observe.page.pictures import Histogram, Line

CSS = (Path(pictures.__file__).parent / "page.html").read_text()
TAGS = {"svg", "g", "path", "use", "defs", "text", "title", "desc", "clipPath", "rect"}
FLOATS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


def points(svg: str, colour: str) -> np.ndarray:
    """The corners of the one open path in a colour, [n, 2]."""
    (path,) = [
        p for p in ET.fromstring(svg).iter("path")
        if f"stroke: var(--{colour})" in p.get("style", "") and "fill: none" in p.get("style", "")
    ]  # fmt: skip
    return np.array(re.findall(r"[ML] ?(-?[\d.]+) (-?[\d.]+)", path.get("d", "")), dtype=float)


@settings(deadline=None, max_examples=12)
@given(ys=st.lists(FLOATS, min_size=3, max_size=40).filter(lambda ys: max(ys) - min(ys) > 1e-2))
def test_a_curve_is_drawn_where_its_numbers_say(ys: list[float]) -> None:
    xs = np.arange(len(ys), dtype=float) ** 1.5
    found = points(pictures.curves([Line("", xs, np.array(ys))]), "s0")
    assert len(found) == len(ys)
    for drawn, numbers in ((found[:, 0], xs), (found[:, 1], np.array(ys))):
        low, high = int(numbers.argmin()), int(numbers.argmax())
        scale = (drawn[high] - drawn[low]) / (numbers[high] - numbers[low])
        expected = drawn[low] + (numbers - numbers[low]) * scale
        assert np.abs(drawn - expected).max() <= 0.2  # coordinates have one decimal
    assert found[np.argmax(ys), 1] < found[np.argmin(ys), 1]  # up is more


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    ys = np.array([1.0, 2.0, np.nan, 1.0, 3.0])
    svg = pictures.curves([Line("", np.arange(5.0), ys)])
    assert len(points(svg, "s0")) == 4
    assert "nan" not in svg.lower()


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2 * pictures.BINS + 1, 1500), seed=st.integers(0, 99), gaps=st.floats(0, 0.9))
def test_a_long_curve_keeps_its_mean_and_its_extremes(count: int, seed: int, gaps: float) -> None:
    draw = np.random.default_rng(seed)
    x, y = np.arange(float(count)), draw.normal(size=count)
    y[draw.random(count) < gaps] = np.nan
    y[count // 2] = 0.0
    shown, mean, low, high = pictures.thin(x, y)
    assert len(shown) == pictures.BINS and (np.diff(shown) > 0).all()
    assert np.nanmin(low) == np.nanmin(y) and np.nanmax(high) == np.nanmax(y)
    known = np.isfinite(mean)
    assert ((low <= mean + 1e-12) & (mean <= high + 1e-12))[known].all()
    sizes = [int(np.isfinite(part).sum()) for part in np.array_split(y, pictures.BINS)]
    assert np.nansum(mean * sizes) == pytest.approx(np.nansum(y))


def test_a_short_curve_is_every_point() -> None:
    x = np.arange(2.0 * pictures.BINS)
    assert all(np.array_equal(part, x) for part in pictures.thin(x, x))


@given(st.lists(st.floats(0, 200), min_size=1, max_size=10), st.floats(1, 15))
def test_labels_are_pushed_apart_and_stay_inside(places: list[float], gap: float) -> None:
    places.sort()
    found = pictures.spread(places, gap, 0.0, 200.0)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(found))
    assert found[0] >= -1e-9 and found[-1] <= 200 + 1e-9
    if all(b - a >= gap for a, b in itertools.pairwise(places)):
        assert found == pytest.approx(places)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_a_bar_is_as_long_as_its_parts(parts: list[float]) -> None:
    svg = pictures.stacks(["planned"], [list(enumerate(parts))], ["x"])
    corners = [re.findall(r"[ML] ?(-?[\d.]+) ", p.get("d", "")) for p in ET.fromstring(svg).iter("path")
               if "fill: var(--s" in p.get("style", "")]  # fmt: skip
    widths = np.array([max(map(float, xs)) - min(map(float, xs)) for xs in corners])
    assert len(widths) == len(parts)
    assert np.abs(widths / widths.sum() - np.array(parts) / sum(parts)).max() < 0.003


def test_bars_of_a_histogram_are_as_high_as_their_counts() -> None:
    counts = np.array([1.0, 4.0, 0.0, 2.0])
    svg = pictures.histograms([Histogram("", counts, np.arange(5.0))])
    (path,) = [p for p in ET.fromstring(svg).iter("path")
               if "stroke: var(--s0)" in p.get("style", "") and "fill: none" in p.get("style", "")]  # fmt: skip
    ys = np.array(re.findall(r"[ML] ?-?[\d.]+ (-?[\d.]+)", path.get("d", "")), dtype=float)
    levels = (ys.max() - ys) / (ys.max() - ys.min()) * 4
    assert {round(level, 2) for level in levels} == {0, 1, 2, 4}


@settings(deadline=None, max_examples=8)
@given(st.lists(st.text(max_size=40), min_size=2, max_size=8, unique=True))
def test_labels_are_texts_whatever_they_say(labels: list[str]) -> None:
    lines = [Line(label, np.arange(3.0), np.arange(3.0) + i, i) for i, label in enumerate(labels)]
    root = ET.fromstring(pictures.titled(pictures.curves(lines), "a", "<b>&", labels[0]))
    shown = [element.text or "" for element in root.iter("text")]
    assert {pictures.shortened(label, 20) for label in labels if label.strip()} <= set(shown) | {""}
    assert {element.tag for element in root.iter()} <= TAGS


def test_only_the_page_gives_colours_and_nothing_points_outside() -> None:
    lines = [Line(str(i), np.arange(3.0), np.arange(3.0) + i, i, ((np.zeros(3), np.ones(3)),), i % 2 == 0)
             for i in range(8)]  # fmt: skip
    one = pictures.dots(["a", "b"], [[1.0, math.nan], [2.0, 3.0]], ["", ""])
    drawn = [pictures.curves(lines), pictures.curves(lines[1:3], log=True), one]
    drawn.append(pictures.stacks(["a"], [[(-1, 1.0), (7, 2.0)]], ["3"]))
    drawn.append(
        pictures.histograms([Histogram("a", np.ones(2), np.arange(3.0)), Histogram("b", np.ones(1), np.arange(2.0))])
    )
    roots = [ET.fromstring(pictures.titled(svg, f"p{i}", "t", "d")) for i, svg in enumerate(drawn)]
    elements = [element for root in roots for element in root.iter()]
    ids = [element.get("id") for element in elements if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in elements:
        assert not re.search(r"#[0-9a-f]{6}|rgb", element.get("style", ""))
        for key, value in element.attrib.items():
            assert "http" not in value
            if key == "href" or "url(" in value:
                assert re.search(r"#([\w-]+)", value)[1] in ids
        for value in re.findall(r"(?:fill|stroke): ([^;]+)", element.get("style", "")):
            assert value == "none" or re.fullmatch(r"var\(--(s[0-5]|ink|muted|grid|page)\)", value)


# ------------------------------------------------------------------------------------------- for every eye

SCHEMES = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.S)]
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "none": "1 0 0  0 1 0  0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  0.004733 0.691367 0.303900",
}


def linear(colour: str) -> np.ndarray:
    """sRGB as hex to linear RGB."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB to CIE L*a*b* under D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x = np.array(to_xyz) @ rgb / np.array([0.95047, 1, 1.08883])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's contrast ratio."""
    bright = sorted(float(np.dot((0.2126, 0.7152, 0.0722), linear(c))) for c in (a, b))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_contrast(scheme: int) -> None:
    colours = SCHEMES[scheme]
    for name in ("ink", "muted", "link", "warn", *(f"s{i}" for i in range(pictures.COLOURS))):
        assert contrast(colours[name], colours["page"]) >= 4.5, name


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("kind", DEFICIENCIES)
def test_series_stay_apart_for_the_colour_blind(scheme: int, kind: str) -> None:
    colours = [SCHEMES[scheme][f"s{i}"] for i in range(pictures.COLOURS)]
    eye = np.array(DEFICIENCIES[kind].split(), dtype=float).reshape(3, 3)
    seen = [lab(np.clip(eye @ linear(colour), 0, 1)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) >= 19
