"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The path of the browser; None: it is not installed."""
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class BrowserError(AssertionError):
    """The page raised, or the browser did not answer."""


class Page:
    """One tab. It keeps the addresses that it asked for, and what it wrote to its console."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids = itertools.count(1)
        self._session: dict[str, str] = {}
        self._rest = b""
        self.requests: list[str] = []
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions that nobody caught."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise BrowserError("the browser has ended")
            self._rest += piece
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression; of a promise, what it resolves to."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Return once the expression is true."""
        ends_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_at:
            if self.evaluate(f"!!({expression})"):
                return
            time.sleep(0.05)
        raise BrowserError(f"{expression}: still not true after {PATIENCE_S:.0f} s; {self.problems}")

    def open(self, url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        """Show a page at this size, for somebody who prefers a light or a dark scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def type(self, text: str) -> None:
        """Insert text where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, code: str = "", alt: bool = False, shift: bool = False) -> None:
        """Press a key and let it go."""
        held = {"key": key, "code": code or key, "modifiers": alt * 1 + shift * 8}
        if key == "Enter":
            held |= {"text": "\r", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", **held)
        self.call("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in held.items() if k != "text"})

    def screenshot(self) -> bytes:
        """The screen, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """A tab of a browser of its own, with an empty profile."""
    assert CHROMIUM is not None
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from descriptor 3 and writes answers to 4.
        start = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
        browser = subprocess.Popen(
            ["bash", "-c", start, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={Path(profile)}"],
            pass_fds=(read_commands, write_answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Page(to_browser, from_browser)
        finally:
            browser.terminate()
            browser.wait(PATIENCE_S)
            os.close(to_browser)
            os.close(from_browser)
