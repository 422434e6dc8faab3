"""Headless Chromium, controlled through its DevTools protocol over a pipe. Without Chromium, ``find()`` returns
None."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_REQUEST = "Network.requestWillBeSent"
TIMEOUT = 60.0  # seconds for one command, or one page


def find() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless Chromium. Use as ``with Browser(path) as page:``."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Chromium reads commands from descriptor 3 and writes replies to 4; a NUL ends each.
        command_read, self._commands = os.pipe()
        self._replies, reply_write = os.pipe()
        arguments = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --mute-audio --no-first-run "
            "--disable-extensions --disable-background-networking --allow-file-access-from-files --remote-debugging-pipe"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$1" {arguments} --user-data-dir="$2" 3<&{command_read} 4>&{reply_write}', "-",
             path, self._profile.name],
            pass_fds=(command_read, reply_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(reply_write)
        self._buffer = b""
        self._count = 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._replies)
        self._profile.cleanup()

    def _read(self) -> dict[str, Any]:
        """The next reply or event. A browser that is silent for a minute is killed, which closes the pipe."""
        timer = threading.Timer(TIMEOUT, self._process.kill)
        timer.start()
        try:
            while b"\0" not in self._buffer:
                part = os.read(self._replies, 1 << 16)
                if not part:
                    raise RuntimeError("Chromium has ended, or did not answer")
                self._buffer += part
        finally:
            timer.cancel()
        message, _, self._buffer = self._buffer.partition(b"\0")
        result: dict[str, Any] = json.loads(message)
        return result

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._events.append(message)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        reply = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"])
        return reply["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window, in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Sets the preferred colour scheme, light or dark, for the next pages. Clears what pages have stored."""
        self.evaluate("try { localStorage.clear() } catch (error) {}")
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Opens a page and waits until it is loaded."""
        self._load(url)
        self._events.clear()

    def _load(self, url: str) -> None:
        """Keeps the events."""
        self._events.clear()
        self.send("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())

    def requested_by(self, url: str) -> list[str]:
        """Opens a page and returns the addresses that it requests, including those of the second after it has
        loaded."""
        self.send("Network.enable")
        self._load(url)
        self.evaluate("new Promise((done) => setTimeout(done, 1000))")
        found = [event["params"]["request"]["url"] for event in self._events if event.get("method") == _REQUEST]
        self._events.clear()
        self.send("Network.disable")
        return found

    def screenshot(self, path: Path | None = None, **clip: float) -> bytes:
        """A PNG of the whole page, or of a part of it (x, y, width, height)."""
        if not clip:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {name: size[name] for name in ("x", "y", "width", "height")}
        reply = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1})
        png = base64.b64decode(reply["data"])
        if path is not None:
            path.write_bytes(png)
        return png
