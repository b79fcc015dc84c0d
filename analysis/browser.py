"""A real Chromium without a window, for tests of pages and for pictures of them. Needs no package.

    with Browser() as browser:
        page = browser.page("file:///…/report.html", width=390, height=844, dark=True)
        page.picture(Path("phone.png"), whole=True)
        assert page.errors == []

It speaks the Chrome DevTools Protocol through a pipe, so no port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# the browser reads commands from descriptor 3 and writes to 4; both ends are moved out of the way first
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars", "--disable-gpu",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage", "--mute-audio",
)  # fmt: skip


def chromium() -> str | None:
    """Path of the browser; None where there is none. ``$CHROMIUM`` names another."""
    names = (os.environ["CHROMIUM"],) if os.environ.get("CHROMIUM") else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser did not answer, or did not do what it was asked."""


class Browser:
    """One browser process with a profile of its own, ended with the ``with`` block."""

    def __init__(self, *, patience_s: float = 60.0) -> None:
        program = chromium()
        if program is None:
            raise BrowserError(f"no browser found ({', '.join(NAMES)}; $CHROMIUM names another)")
        self.patience_s = patience_s
        self._profile = tempfile.TemporaryDirectory(prefix="tinydit-browser-", ignore_cleanup_errors=True)
        theirs, self._write = os.pipe()
        self._read, back = os.pipe()
        options = [*_OPTIONS, f"--user-data-dir={self._profile.name}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # root cannot have one
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs), str(back), program, *options, "about:blank"],
            pass_fds=(theirs, back), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(back)
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close")
        except (BrowserError, OSError):
            pass
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new tab at ``url``, loaded. Below 500 pixels of width it is a phone."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        phone = width < 500
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
            deviceScaleFactor=2 if phone else 1,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        """One command; events that come meanwhile go to their pages."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        limit = time.monotonic() + self.patience_s
        while True:
            answer = self._next(limit, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return dict(answer.get("result") or {})
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.note(answer)

    def _next(self, limit: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, limit - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise BrowserError(f"{method}: the browser {'ended' if ready else 'did not answer'}")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))


class Page:
    """A tab. ``errors`` holds what its console showed as errors, uncaught exceptions included."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def note(self, event: dict[str, Any]) -> None:
        kind, facts = event.get("method"), event.get("params") or {}
        if kind == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(str((details.get("exception") or {}).get("description") or details.get("text")))
        elif kind == "Runtime.consoleAPICalled" and facts.get("type") in ("error", "assert"):
            self.errors.append(" ".join(str(item.get("value")) for item in facts.get("args", [])))
        elif kind == "Log.entryAdded" and facts["entry"].get("level") == "error":
            self.errors.append(f"{facts['entry'].get('text')} {facts['entry'].get('url', '')}".strip())

    def go(self, url: str) -> None:
        """Open the address and wait until it has loaded. Raises BrowserError where it cannot be reached."""
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(str((details.get("exception") or {}).get("description") or details.get("text")))
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float | None = None) -> Any:
        """Wait until the expression is true in the page; its value."""
        limit = time.monotonic() + (seconds or self._browser.patience_s)
        while True:
            try:
                if value := self.js(expression):
                    return value
            except BrowserError:  # between two documents there is nothing to ask
                if time.monotonic() > limit:
                    raise
            if time.monotonic() > limit:
                raise BrowserError(f"never true: {expression}")
            time.sleep(0.1)

    def click(self, element: str) -> None:
        """Press and release the mouse in the middle of the element that the expression names; waits for it."""
        box = self.wait(
            f"(() => {{ const it = {element}; if (!it) return null; it.scrollIntoView({{block: 'nearest'}});"
            " const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            press = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **press)

    def write(self, text: str) -> None:
        """Type the text where the cursor is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in view, or of the whole page."""
        clip: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        found = self.call("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(found["data"]))
