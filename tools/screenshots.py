"""The pictures of docs/report.md: `python tools/screenshots.py report.html docs/images`."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image
from tests.browser.chromium import Chromium, Tab, find_chromium, running

MOST = 300_000  # bytes of a picture


def main() -> None:
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    program = find_chromium()
    if program is None:
        raise SystemExit("there is no Chromium on this machine; apt-get install chromium")
    with running(program) as browser:
        take(browser, page, folder / "report-desktop-light.png", width=1280, height=1180)
        take(browser, page, folder / "report-desktop-dark.png", width=1280, height=900, dark=True, at="#points")
        take(browser, page, folder / "report-phone-light.png", width=390, height=844)
        take(browser, page, folder / "report-phone-dark.png", width=390, height=844, dark=True, at="#explorer")


def take(
    browser: Chromium, page: Path, out: Path, *, width: int, height: int, dark: bool = False, at: str | None = None
) -> None:
    """Take a picture at one width; `at`: scrolled there, with an input chosen that merging broke."""
    with browser.tab(width=width, height=height, dark=dark, still=True) as tab:
        tab.open(page)
        if at is not None:
            choose(tab, at)
        data = base64.b64decode(tab.send("Page.captureScreenshot", format="png")["data"])
    Image.open(io.BytesIO(data)).convert("RGB").save(out, optimize=True)
    size = out.stat().st_size
    if size > MOST:
        raise SystemExit(f"{out} is larger than {MOST / 1000:.0f} kB")


def choose(tab: Tab, at: str) -> None:
    tab.run("document.querySelectorAll('#p-views button')[1].click()")
    tab.until("document.querySelector('#p-canvas').dataset.settled === 'merged'")
    tab.run("document.getElementById('p-broken').click()")
    tab.run("document.getElementById('p-canvas').focus({preventScroll: true})")
    tab.run("document.getElementById('p-broken').click()")
    tab.run("document.activeElement.blur()")
    tab.run(f"scrollTo({{top: document.querySelector('{at}').getBoundingClientRect().top - 24, behavior: 'instant'}})")
    tab.run("new Promise(done => setTimeout(done, 300))")


if __name__ == "__main__":
    main()
