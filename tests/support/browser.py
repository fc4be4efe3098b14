"""A real browser: opens a file in headless Chromium, over the DevTools protocol on a pipe, and hears its complaints."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SECONDS = 90.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    """The browser. Without one the test is skipped, but fails on CI: there it must be seen."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        words = "no Chromium on PATH: apt-get install chromium"
        pytest.fail(words) if os.environ.get("CI") else pytest.skip(words)
    return found


class Browser:
    """One page. Use it as a context.

    Args:
        profile: An empty folder.
    """

    def __init__(self, profile: Path) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._left = b""
        self._session: str | None = None
        name = chromium()
        to_browser, self._out = _pipe()
        self._in, from_browser = _pipe()
        command = [name, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stdin=null, stdout=null, stderr=null
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Browser:
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _attach(self) -> None:
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)
        os.close(self._in)
        os.close(self._out)

    def open(self, file: Path, width: int = 1280, dark: bool = False) -> None:
        """Shows a file as a screen of this width does; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=theme)
        self.call("Page.navigate", url=file.as_uri())
        end = time.monotonic() + SECONDS
        while not self.value("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives, as JSON has it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(facts["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(facts["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(facts["entry"]))

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._left += data
        line, _, self._left = self._left.partition(b"\0")
        return json.loads(line)  # type: ignore[no-any-return]


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are out of the way of those that the browser wants, 3 and 4."""
    found = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in found]
    for end in found:
        os.close(end)
    return moved[0], moved[1]
