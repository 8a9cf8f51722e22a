"""A headless Chromium that a test drives over a pipe: load a page, evaluate an expression in it, send it the mouse and keys, photograph it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a browser; messages go as JSON that ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, ""
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.requests: list[str] = []

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._from, 2**16)
            assert got, "the browser has gone"
            self._rest += got
        first, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(str(answer["params"]["exceptionDetails"]))
            case "Log.entryAdded" if answer["params"]["entry"]["level"] == "error":
                self.console.append(answer["params"]["entry"]["text"])
            case "Runtime.consoleAPICalled" if answer["params"]["type"] in ("error", "warning"):
                self.console.append(str(answer["params"]["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
        return answer

    def open(
        self, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", scripts: bool = True
    ) -> None:
        """Load a page and wait until its script has drawn it."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._call(
            "Emulation.setEmulatedMedia",
            media="",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._call("Page.navigate", url=file.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        if scripts:
            self.evaluate("window.zosim.then((timeline) => { window.timeline = timeline; })")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited."""
        result = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event at a point of the viewport."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str, text: str = "") -> None:
        """Press a key on what has the focus."""
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def print_media(self) -> None:
        """Show the page as it is printed, until the next one is opened."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def photograph(self, file: Path) -> None:
        """Write what the whole page looks like as a PNG."""
        shown = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shown["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in `folder`, and end it."""
    read_end, write_end = os.pipe()
    from_read, from_write = os.pipe()
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}",
        "--disable-background-networking", "--no-first-run",
    ]  # fmt: skip

    # The browser reads from descriptor 3 and writes to 4.
    placed = f'exec "$@" 3<&{read_end} 4>&{from_write}'
    process = subprocess.Popen(
        ["bash", "-c", placed, "bash", *command],
        pass_fds=(read_end, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(from_write)
    try:
        yield Browser(write_end, from_read)
    finally:
        process.kill()
        process.wait()
        os.close(write_end)
        os.close(from_read)
