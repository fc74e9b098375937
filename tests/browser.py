"""A real browser without a window, asked over its own protocol (chrome --remote-debugging-pipe)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS: Final = 60.0


def program() -> str | None:
    """Return a Chromium of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Commands are named as the protocol names them."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._unread, self._number, self._session = b"", 0, ""
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Have one thing done, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(str(answer.get("method")))
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._answers], [], [], left)[0], "the browser does not answer"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def show(self, url: str, width: int, height: int) -> None:
        """Load a page in a window, or on a phone, of this size."""
        is_phone = width < height
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._events.append(str(self._next().get("method")))

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """Run one until the block ends; all that it keeps is below `home`."""
    found = program()
    assert found is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    # It takes its commands on 3 and gives its answers on 4.
    words = [
        *("bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash"),
        *(found, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
        *("--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
        *("--disable-component-update", "--disable-background-networking", "--disable-sync"),
        f"--user-data-dir={home}",
    ]
    process = subprocess.Popen(
        words,
        pass_fds=(to_read, to_write),
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(to_read)
        os.close(to_write)
        yield Browser(commands, answers)
    finally:
        # Who hears nothing any more ends, with all that it started.
        os.close(commands)
        os.close(answers)
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
