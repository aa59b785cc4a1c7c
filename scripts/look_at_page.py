"""Opens a page in a headless Chromium, narrow and wide, light and dark: says what is wrong, and takes pictures of it.

Usage: python scripts/look_at_page.py PAGE.html [FOLDER]      the pictures go into FOLDER, NAME-WIDTH-SCHEME.png

Needs the extra ``browser`` and Chromium (Debian: ``apt-get install chromium``; elsewhere CHROMIUM=PATH).
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import BrowserContext, sync_playwright

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
WIDTHS, SCHEMES = (380, 1400), ("light", "dark")
COLOURS = 128  # of a picture: fewer, and series change theirs
# Of each figure, the drawings that are seen: exactly one is right.
DRAWN = """() => [...document.querySelectorAll('figure')].map(figure => [...figure.querySelectorAll('svg')]
    .map(svg => svg.getBoundingClientRect()).filter(box => box.width > 0 && box.height > 0)
    .map(box => ({left: box.left, right: box.right, width: box.width, height: box.height})))"""


@contextmanager
def chromium() -> Iterator[BrowserContext]:
    """A browser with a profile of its own, gone afterwards."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("error: no Chromium here: apt-get install chromium, or name one with CHROMIUM=PATH")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(profile, executable_path=path, args=list(FLAGS))
        yield context
        context.close()


def look(page: Path, folder: Path | None) -> bool:
    """Prints a line for each width and scheme; True where nothing is wrong."""
    good = True
    with chromium() as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                told: list[str] = []
                tab = browser.new_page()
                tab.on("console", lambda message, told=told: told.append(message.text))
                tab.on("pageerror", lambda error, told=told: told.append(str(error)))
                tab.set_viewport_size({"width": width, "height": 900})
                tab.emulate_media(color_scheme=scheme)
                tab.goto(page.resolve().as_uri())
                drawn = tab.evaluate(DRAWN)
                missing = sum(len(boxes) != 1 for boxes in drawn)
                over = tab.evaluate("document.documentElement.scrollWidth") - width
                print(f"{width} px, {scheme}: {len(drawn)} pictures, {missing} not drawn, {max(over, 0)} px too wide, "
                      f"{len(told)} console messages {told or ''}")  # fmt: skip
                good &= bool(drawn) and not (missing or told or over > 0)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    image = Image.open(io.BytesIO(tab.screenshot(full_page=True)))
                    name = f"{page.parent.name if page.stem == 'report' else page.stem}-{width}-{scheme}.png"
                    image.convert("RGB").quantize(COLOURS).save(folder / name, optimize=True)
                tab.close()
    return good


def main() -> None:
    """The command line."""
    if len(sys.argv) not in (2, 3) or not Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    sys.exit(0 if look(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else None) else 1)


if __name__ == "__main__":
    main()
