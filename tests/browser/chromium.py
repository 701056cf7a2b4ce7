"""A real browser for tests: Debian's Chromium without a window, controlled over the DevTools protocol."""

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
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def wait(done: Callable[[], object], step: float = 0.02) -> None:
    """Until something is true."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(step)


class Chromium:
    """A browser with a profile of its own."""

    def __init__(self, port: int) -> None:
        with urlopen(f"http://127.0.0.1:{port}/json/version", timeout=PATIENCE) as answer:
            about: dict[str, str] = json.load(answer)
        self.name, self._address = about["Browser"], about["webSocketDebuggerUrl"]

    @contextmanager
    def tab(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True, still: bool = False
    ) -> Iterator[Tab]:
        """An empty page. `still`: for a reader who does not want things to move."""
        from websockets.sync.client import connect

        with connect(self._address, max_size=None, open_timeout=PATIENCE) as socket:
            tab = Tab(socket)
            target = tab.send("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.send(f"{domain}.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            tab.send("Emulation.setDeviceMetricsOverride", **size)
            tab.media(dark=dark, still=still)
            tab.send("Emulation.setScriptExecutionDisabled", value=not script)
            yield tab
            tab.send("Target.closeTarget", targetId=target)


class Tab:
    """One page. `events`: all that it has reported, in order."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        self._last = 0

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, to the page or to the browser (`Target.*`), and return its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer: dict[str, Any] = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def media(self, *, kind: str = "", dark: bool = False, still: bool = False) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", media=kind, features=features)

    def open(self, path: Path) -> None:
        """Load a file completely."""
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        # Each command takes in what was reported meanwhile.
        wait(lambda: self.send("Target.getTargets") and self.reported("Page.loadEventFired"))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Until an expression is true in the page."""
        wait(lambda: self.run(f"!!({script})"))

    def box(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, scrolled into view."""
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

    def reported(self, method: str) -> list[dict[str, Any]]:
        """What events of one kind say."""
        return [event["params"] for event in self.events if event["method"] == method]

    def problems(self) -> list[str]:
        """Errors and warnings of the page."""
        bad, console = ("error", "warning", "assert"), self.reported("Runtime.consoleAPICalled")
        calls = [call for call in console if call["type"] in bad]
        lines = [line for line in self.reported("Log.entryAdded") if line["entry"]["level"] in bad]
        return list(map(str, (*self.reported("Runtime.exceptionThrown"), *calls, *lines)))

    def requests(self) -> list[str]:
        """Addresses that were requested, except data in the page itself."""
        addresses = [event["request"]["url"] for event in self.reported("Network.requestWillBeSent")]
        return [address for address in addresses if not address.startswith("data:")]


@contextmanager
def running(program: str) -> Iterator[Chromium]:
    """A browser that is stopped afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        command = [program, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = Path(profile) / "DevToolsActivePort"
        try:
            wait(lambda: child.poll() is not None or (port.is_file() and port.read_text().split()), 0.05)
            assert child.poll() is None, "Chromium ended at once"
            yield Chromium(int(port.read_text().split()[0]))
        finally:
            child.terminate()
            child.wait(timeout=PATIENCE)
