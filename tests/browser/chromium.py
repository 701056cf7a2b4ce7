"""A real browser for tests: Debian's Chromium without a window, spoken to over the DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30.0  # seconds that anything may take


def find_chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """A browser with a profile of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    @contextmanager
    def tab(self, **options: Any) -> Iterator[Tab]:
        """An empty page; see `Tab.open`."""
        from websockets.sync.client import connect

        version = self._get("version")
        with connect(version["webSocketDebuggerUrl"], max_size=None, open_timeout=PATIENCE) as socket:
            tab = Tab(socket)
            made = tab.browser("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.browser("Target.attachToTarget", targetId=made, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.send(f"{domain}.enable")
            tab.prepare(**options)
            yield tab
            tab.browser("Target.closeTarget", targetId=made)

    def version(self) -> str:
        """Name and number."""
        return str(self._get("version")["Browser"])

    def _get(self, what: str) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.port}/json/{what}", timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


class Tab:
    """One page. `events`: all that it has reported, in order."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        self._last = 0

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this page, and its answer."""
        return self._send(method, parameters, self.session)

    def browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the browser."""
        return self._send(method, parameters, None)

    def prepare(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True, still: bool = False
    ) -> None:
        """What the page will find; `still`: a reader who does not want things to move."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.media(dark=dark, still=still)
        self.send("Emulation.setScriptExecutionDisabled", value=not script)

    def media(self, *, kind: str = "", dark: bool = False, still: bool = False) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", media=kind, features=features)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, done: Callable[[], object]) -> None:
        """Until something is so."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, "the page did not get there"
            self.browser("Target.getTargets")  # takes in what was reported meanwhile
            time.sleep(0.02)

    def until(self, script: str) -> None:
        """Until an expression is true in the page."""
        self.wait(lambda: self.run(f"!!({script})"))

    def box(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, brought into sight."""
        x, y = self.run(
            f"(async () => {{const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "for (let n = 0; n < 2; n++) await new Promise(requestAnimationFrame); "
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2];})()"
        )
        return float(x), float(y)

    def hover(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """With the mouse, where the element is."""
        x, y = self.box(selector)
        self.hover(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def problems(self) -> list[str]:
        """Everything that the page complained about."""
        found = []
        for event in self.events:
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str(told["args"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(str(told["entry"]))
        return found

    def requests(self) -> list[str]:
        """What was asked for, but for data that is in the page itself."""
        asked = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in asked if not address.startswith("data:")]

    def _send(self, method: str, parameters: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps({**message, **({"sessionId": session} if session else {})}))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found
            if "method" in answer:
                self.events.append(answer)


@contextmanager
def running(program: str) -> Iterator[Chromium]:
    """A browser that is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        command = [program, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield Chromium(_port(Path(profile) / "DevToolsActivePort", child))
        finally:
            child.terminate()
            child.wait(timeout=PATIENCE)


def _port(file: Path, child: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert child.poll() is None, "Chromium ended at once"
        if file.is_file() and (words := file.read_text().split()):
            return int(words[0])
        time.sleep(0.05)
    raise TimeoutError("Chromium did not open its port")
