"""The page in a real browser."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.browser.chromium import Chromium, Tab
from tests.reporting.making import ALERT, BREAK_OUT

MEANS = (
    "[...document.querySelectorAll('.board[data-access=inductive] tbody tr')]"
    ".map(r => r.cells[0].firstChild.textContent.trim())"
)
SHOWN = "[...document.querySelectorAll('table.accuracy tbody tr')].filter(r => r.checkVisibility()).length"


def enter(tab: Tab, name: str, value: str, event: str = "input") -> None:
    """Set the value of a field, as a reader does."""
    tab.run(
        f"(() => {{const e = document.getElementById({name!r}); e.value = {value!r}; "
        f"e.dispatchEvent(new Event({event!r}, {{bubbles: true}}));}})()"
    )


@pytest.fixture
def tab(browser: Chromium, page: Path) -> Iterator[Tab]:
    with browser.tab(still=True) as opened:
        opened.open(page)
        yield opened
        assert opened.problems() == []


def test_everything_is_in_the_page(tab: Tab, page: Path) -> None:
    tab.until("document.querySelector('#p-canvas').dataset.settled === 'expert'")
    assert tab.requests() == [page.resolve().as_uri()]
    assert tab.run("document.title") == "toy: one model from many"
    links = tab.run("[...document.querySelectorAll('a[download]')].map(a => [a.download, a.href.slice(0, 20)])")
    names = {name for name, _ in links}
    assert {"inductive.csv", "inductive.tex", "comparisons.md", "shots.csv", "shots.svg", "points-0.csv"} <= names
    assert all(address.startswith("data:") for _, address in links)
    # Headings and landmarks
    levels = tab.run("[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert tab.run("['main', 'nav', 'footer', 'header'].every(n => document.querySelectorAll(n).length === 1)")
    assert tab.run("[...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('th[scope=row]'))")
    assert tab.run("[...document.querySelectorAll('svg.plot')].every(s => s.getAttribute('aria-label'))")
    assert tab.run("[...document.querySelectorAll('nav a')].every(a => document.getElementById(a.hash.slice(1)))")
    tab.press("Tab")
    assert tab.run("document.activeElement.className") == "skip"


def test_sorting(tab: Tab) -> None:
    assert tab.run(MEANS) == ["ties", "average"]
    head = ".board[data-access=inductive] thead th"
    tab.click(f"{head}:nth-child(1) button")
    assert tab.run(MEANS) == ["average", "ties"]
    assert tab.run(f"document.querySelector('{head}').ariaSort") == "ascending"
    tab.click(f"{head}.mean button")
    assert tab.run(MEANS) == ["ties", "average"]
    assert tab.run(f"document.querySelector('{head}').ariaSort") is None
    tab.run(f"document.querySelector('{head}.mean button').focus()")
    tab.press("Enter")
    tab.send("Input.dispatchKeyEvent", type="char", text="\r")
    tab.until(f"{MEANS}[0] === 'average'")
    assert tab.run(f"document.querySelector('{head}.mean').ariaSort") == "ascending"
    count = tab.run("document.querySelectorAll('table.accuracy thead th').length")
    assert count == tab.run("document.querySelectorAll('table.accuracy thead th button').length") > 20
    tab.run("document.querySelectorAll('table.accuracy thead th button').forEach(b => { b.click(); b.click(); })")
    assert tab.run("document.querySelectorAll('th[aria-sort]').length") == 3


def test_filtering(tab: Tab) -> None:
    assert tab.run(SHOWN) == 6

    def find(text: str) -> object:
        enter(tab, "find", text)
        return tab.run(SHOWN)

    assert find("average") == 1
    assert find("TIES auto") == 1
    assert find("-joint") == 5
    assert tab.run("document.getElementById('count').textContent") == "5 of 6 rows"
    assert find("nothing") == 0
    assert tab.run("document.getElementById('nothing').checkVisibility()")
    tab.click("#filters button[type=reset]")
    tab.until(f"{SHOWN} === 6")
    enter(tab, "access", "transductive")
    assert tab.run(SHOWN) == 1


def test_a_cell_tells_its_interval(tab: Tab) -> None:
    tab.hover(*tab.box(".board[data-access=data-free] tbody tr:nth-child(2) td.worse"))
    tab.until("!document.getElementById('tip').hidden")
    tip = tab.run("document.getElementById('tip').textContent")
    assert tip == "62.0 % (60.0 to 64.0), 100 inputs. Here worse than expert (McNemar, Holm)."
    tab.press("Escape")
    tab.until("document.getElementById('tip').hidden")


def test_views_are_toggled(browser: Chromium, page: Path) -> None:
    with browser.tab(still=False) as tab:
        tab.open(page)
        tab.until("document.querySelector('#p-canvas').dataset.settled === 'expert'")
        click = "document.querySelector('#p-views button:nth-child(2)').click();"
        assert tab.run(f"{click} document.querySelector('#p-canvas').dataset.settled") is None, "it moves there"
        tab.until("document.querySelector('#p-canvas').dataset.settled === 'merged'")
        assert tab.run("document.getElementById('p-title').textContent") == "merged (50.0 %)"
        pressed = "[...document.querySelectorAll('#p-views button')].map(b => b.ariaPressed)"
        assert tab.run(pressed) == ["false", "true", "false"]
        assert tab.problems() == []


def test_pointing_at_a_dot(tab: Tab) -> None:
    tab.until("document.querySelector('#p-canvas').dataset.settled === 'expert'")
    middle = tab.box("#p-canvas")
    # Where the first dot is, from its place among the data: a frame of 14 pixels, the longer side filled.
    x, y = tab.run(
        """(() => {
          const [f] = JSON.parse(document.getElementById('points-data').textContent);
          const c = document.getElementById('p-canvas'), [w, h] = f.size;
          const by = Math.min((c.clientWidth - 28) / w, (c.clientHeight - 28) / h);
          return [by * (f.views[0].x[0] - w / 2), by * (f.views[0].y[0] - h / 2)];
        })()"""
    )
    tab.hover(middle[0] + x, middle[1] + y)
    tab.until("document.getElementById('p-input').childElementCount")
    text = tab.run("document.getElementById('p-input').innerText")
    for word in ("a sentence that somebody wrote", "true class", "expert says", "merged says", "aligned says"):
        assert word in text


def test_walking_with_the_keyboard(tab: Tab) -> None:
    tab.until("document.querySelector('#p-canvas').dataset.settled === 'expert'")
    tab.run("document.getElementById('p-canvas').focus()")
    tab.until("document.querySelector('#p-canvas').dataset.chosen >= 0")
    first = tab.run("document.querySelector('#p-canvas').dataset.chosen")
    tab.press("ArrowLeft")
    tab.press("ArrowDown")
    assert tab.run("document.querySelector('#p-canvas').dataset.chosen") != first
    tab.press("Escape")
    assert tab.run("document.getElementById('p-input').childElementCount") == 0
    assert tab.run("document.getElementById('p-broken-text').textContent") == "only what merging broke (15)"
    tab.click("#p-broken")
    tab.run("document.getElementById('p-canvas').focus()")
    for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"):
        tab.press(key)
        assert int(tab.run("document.querySelector('#p-canvas').dataset.chosen")) % 2 == 0
    # The task is switched.
    enter(tab, "p-task", "1", "change")
    tab.press("ArrowLeft")
    tab.until("document.querySelector('#p-input img')")
    assert tab.run("document.querySelector('#p-input img').src.startsWith('data:image/png')")
    assert tab.run("document.querySelector('#p-input img').naturalWidth") == 1


def test_colours_are_toggled(tab: Tab) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.run(ground)
    tab.click("#theme")
    assert tab.run(ground) != light
    tab.click("#theme")
    assert tab.run(ground) == light
    tab.media(dark=True)
    tab.run("delete document.documentElement.dataset.theme")
    assert tab.run(ground) != light


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read(browser: Chromium, page: Path, dark: bool) -> None:
    """Contrast of at least 4.5 to 1 between every text and what is behind it."""
    script = """(() => {
      const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = c => {
        const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(linear);
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const ground = e => {
        for (; e; e = e.parentElement) {
          const c = getComputedStyle(e).backgroundColor;
          if (!/, 0\\)|transparent/.test(c)) return c;
        }
      };
      const bad = new Set();
      for (const e of document.querySelectorAll('main *, nav *, footer *')) {
        const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!text || e.closest('svg, canvas') || !e.checkVisibility()) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.add(`${e.tagName}.${e.className} ${ratio.toFixed(2)}`);
      }
      return [...bad]; })()"""
    with browser.tab(dark=dark) as tab:
        tab.open(page)
        assert tab.run(script) == []


def test_labels_are_inert(browser: Chromium, hostile_page: Path) -> None:
    with browser.tab(still=True) as tab:
        tab.open(hostile_page)
        tab.run("document.getElementById('p-canvas').focus()")
        tab.until("document.querySelector('#p-canvas').dataset.chosen >= 0")
        assert tab.run("document.querySelector('#p-input blockquote').textContent") == BREAK_OUT + ALERT
        tab.hover(*tab.box(".board tbody td.n[data-v]"))
        assert tab.run("document.querySelectorAll('main img, main script, #tip *').length") == 0
        assert tab.run("document.title") == ALERT
        assert tab.run("document.querySelector('h1').textContent") == ALERT
        assert tab.reported("Page.javascriptDialogOpening") == []
        assert tab.requests() == [hostile_page.resolve().as_uri()]
        assert tab.problems() == []


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_has_nothing_to_scroll_sideways(browser: Chromium, page: Path, hostile_page: Path, width: int) -> None:
    with browser.tab(width=width, height=844) as tab:
        for one in (hostile_page, page):
            tab.open(one)
            assert tab.run("document.documentElement.scrollWidth") <= width
            tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert tab.run("document.documentElement.scrollWidth") <= width
        left = "document.querySelector('table.accuracy tbody th').getBoundingClientRect().left"
        before = tab.run(left)
        scroll = "const s = document.querySelector('.scroll'); s.scrollLeft = 200; return s.scrollLeft;"
        assert tab.run(f"(() => {{{scroll}}})()") > 50
        assert tab.run(left) == pytest.approx(before, abs=2), "the first column stays"


def test_it_works_without_a_script(browser: Chromium, page: Path) -> None:
    with browser.tab(script=False) as tab:
        tab.open(page)
        root = tab.send("DOM.getDocument", depth=-1)["root"]["nodeId"]

        def visible(selector: str) -> int:
            nodes = tab.send("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
            script = "function() { return this.checkVisibility(); }"
            count = 0
            for node in nodes:
                name = tab.send("DOM.resolveNode", nodeId=node)["object"]["objectId"]
                how = {"objectId": name, "functionDeclaration": script, "returnByValue": True}
                count += bool(tab.send("Runtime.callFunctionOn", **how)["result"]["value"])
            return count

        assert visible("table.accuracy tbody tr") == 6
        assert visible(".static-points svg.plot") == 2
        assert visible(".gallery svg.plot") == 5
        assert visible("#explorer, #filters, #theme") == 0
        assert visible("td[title]") > 20


def test_print_is_whole(tab: Tab, tmp_path: Path) -> None:
    enter(tab, "find", "average")
    tab.media(kind="print", dark=True)
    assert tab.run(SHOWN) == 6, "a filter of the screen is none on paper"
    assert tab.run("[...document.querySelectorAll('.static-points svg.plot')].every(s => s.checkVisibility())")
    assert not tab.run("['#explorer', '#filters', 'nav'].some(s => document.querySelector(s).checkVisibility())")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.media()
    pdf = base64.b64decode(tab.send("Page.printToPDF", printBackground=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 1
    if program := shutil.which("pdftotext"):
        (tmp_path / "page.pdf").write_bytes(pdf)
        command = [program, "-layout", str(tmp_path / "page.pdf"), "-"]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
        for wanted in ("Mostly misalignment", "surgery", "joint", "Against expert", "task-5", "orthomerge run r.yaml"):
            assert wanted in text.stdout
