"""The page in a real headless Chromium: wide and narrow, light and dark, by keyboard and in print.

``bash scripts/test.sh -m browser``; needs Chromium (Debian: ``apt-get install chromium``; elsewhere ``CHROMIUM=PATH``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import page_runs
import pytest
from page_runs import EVIL
from playwright.sync_api import BrowserContext, Page

from stack.observe.page import page

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import look_at_page

VIEWS = [(width, scheme) for width in (380, 820, 1400) for scheme in ("light", "dark")]
INK = """() => [...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().width > 0)
    .map(svg => [...svg.querySelectorAll('path, use, rect')].filter(mark => {
        const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
        return (box.width > 0 || box.height > 0) && (style.stroke !== 'none' || style.fill !== 'none');
    }).length)"""
SIZES = """() => [...document.querySelectorAll('figure svg text')]
    .filter(text => text.getBoundingClientRect().width > 0)
    .map(text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)"""
CUT = """() => [...document.querySelectorAll('figure svg text')].filter(text => text.getBoundingClientRect().width > 0)
    .filter(text => text.getBoundingClientRect().left < 0 || text.getBoundingClientRect().right > innerWidth)
    .map(text => text.textContent)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("browser")
    one = page_runs.write(root, "one", page_runs.full(400, ("the cat " + EVIL, "x" * 3000)), "train.steps=400")
    two = page_runs.write(root, "another-with-a-long-name", page_runs.full(60), "train.steps=90", "seed=3")
    return {
        "one": page.write([one], root / "one.html"),
        "several": page.write([one, two], root / "several.html"),
        "stopped": page.write([two], root / "stopped.html"),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    with look_at_page.chromium() as context:
        yield context


@pytest.fixture
def opened(browser: BrowserContext) -> Iterator[Page]:
    """A page that must say nothing on its console and ask for nothing but its file."""
    told: list[str] = []
    tab = browser.new_page()
    tab.on("console", lambda message: told.append(message.text))
    tab.on("pageerror", lambda error: told.append(str(error)))
    tab.on("dialog", lambda dialog: told.append(dialog.message))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or told.append(request.url))
    yield tab
    tab.close()
    assert told == []


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["one", "several", "stopped"])
def test_every_picture_is_drawn_and_readable(
    opened: Page, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    opened.emulate_media(color_scheme=scheme)
    opened.goto(pages[name].as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    drawn = opened.evaluate(look_at_page.DRAWN)
    assert len(drawn) > 5
    for boxes in drawn:
        assert len(boxes) == 1, "one drawing of each picture is seen"
        assert boxes[0]["width"] > 250 and boxes[0]["height"] > 50
        assert boxes[0]["left"] >= 0 and boxes[0]["right"] <= width
    assert min(opened.evaluate(INK)) >= 2
    sizes = opened.evaluate(SIZES)
    assert min(sizes) >= 10 and max(sizes) <= 17
    assert opened.evaluate(CUT) == []


@pytest.mark.browser
def test_dark_and_print_change_the_pictures_too(opened: Page, pages: dict[str, Path]) -> None:
    def colours() -> tuple[str, str]:
        line = "[...document.querySelectorAll('figure svg path')].find(p => p.style.stroke === 'var(--s0)')"
        return (
            opened.evaluate("getComputedStyle(document.body).backgroundColor"),
            opened.evaluate(f"getComputedStyle({line}).stroke"),
        )

    opened.goto(pages["one"].as_uri())
    opened.emulate_media(color_scheme="light")
    light = colours()
    opened.emulate_media(color_scheme="dark")
    dark = colours()
    assert light[0] != dark[0] and light[1] != dark[1]
    opened.emulate_media(color_scheme="dark", media="print")
    assert colours() == light, "paper is white"
    assert not opened.is_visible("nav")
    assert opened.evaluate("document.querySelector('details.group table').getBoundingClientRect().height") > 0
    assert opened.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.browser
def test_the_keyboard_reaches_everything(opened: Page, pages: dict[str, Path]) -> None:
    opened.goto(pages["one"].as_uri())

    def focused() -> str:
        return opened.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent.trim()")

    opened.keyboard.press("Tab")
    assert focused() == "A Skip to the content"
    assert opened.evaluate("document.activeElement.getBoundingClientRect().left") >= 0, "seen once it has the focus"
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "content"
    opened.keyboard.press("Tab")
    assert focused() == "SUMMARY Numbers"
    opened.keyboard.press("Enter")
    assert opened.is_visible("figure.main table")
    reached = []
    for _ in range(200):
        opened.keyboard.press("Tab")
        reached.append(focused())
        if reached[-1].startswith("BODY"):
            break
    links = opened.evaluate("document.querySelectorAll('nav a').length")
    folded = opened.evaluate("document.querySelectorAll('summary').length")
    assert sum(text.startswith("A ") for text in reached) == links
    assert sum(text.startswith("SUMMARY ") for text in reached) == folded - 1


@pytest.mark.browser
def test_what_a_sample_says_is_seen_and_not_done(opened: Page, pages: dict[str, Path]) -> None:
    opened.goto(pages["one"].as_uri())
    assert EVIL in opened.inner_text("#samples")
    assert opened.evaluate("document.images.length + document.scripts.length") == 0
