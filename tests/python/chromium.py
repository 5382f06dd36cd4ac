"""A real browser for tests of pages: Debian's chromium without a screen, driven through a pipe."""

import base64
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

PATIENCE_SECONDS = 60


class Chromium:
    """One tab, in the protocol of its developer tools. Every page is opened anew."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._session = ""
        self._calls = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []  # since the page was opened

    def open(self, page: Path | str, *, width: int = 1200, dark: bool = False) -> None:
        """A file or a URL. Waits until it is loaded; afterwards `events` tells what happened meanwhile."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._has("Page.loadEventFired"):
            self._take()
        self.evaluate("1")  # what was reported before has arrived

    def evaluate(self, expression: str) -> Any:
        """Of the page; as JSON has it."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(reply["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def addresses(self) -> list[str]:
        """Whatever the page asked for, itself included."""
        asked = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def complaints(self) -> list[str]:
        """What its console says: errors, warnings, refused loads, exceptions."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e["method"] in kinds]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._take()
            if reply.get("id") == number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        reply = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = reply["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _has(self, method: str) -> bool:
        return any(event["method"] == method for event in self.events)

    def _take(self) -> dict[str, Any]:
        """The next message; events are kept."""
        end = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            assert left > 0 and select([self._read], [], [], left)[0], "the browser says nothing"
            read = os.read(self._read, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def chromium() -> Iterator[Chromium]:
    program = shutil.which("chromium")
    assert program is not None, "chromium is not installed: apt-get install chromium"
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",  # reads 3, writes 4
            f"--user-data-dir={folder}",
        ]
        log = f"{folder}/log"
        actions = [
            (os.POSIX_SPAWN_DUP2, to_browser[0], 3),
            (os.POSIX_SPAWN_DUP2, from_browser[1], 4),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        environment = {**os.environ, "HOME": folder}
        pid = os.posix_spawn(program, arguments, environment, file_actions=actions, setpgroup=0)
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            browser = Chromium(to_browser[1], from_browser[0])
            browser.attach()
            yield browser
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(to_browser[1])
            os.close(from_browser[0])
