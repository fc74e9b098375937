"""A sidecar that runs: what it said, what it answers over HTTP, and how it ends."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blackbox.harness import LAUNCH, House
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 30.0
LOOKS = 200
HASTY = f"from entrypoint import spelling; spelling.LEAST_PERIOD = 0.0; {LAUNCH}"
"""Tests would wait for the second that lies between two looks at least."""
OFTEN = (
    *("--watch-interval", "0.02s", "--collect-interval", "never", "--listen", "127.0.0.1:0"),
    *("--prove-idle", "no"),
)

_WITHOUT = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner")
POWERLESS = _WITHOUT if os.geteuid() == 0 else ()
"""To start a process with: who is root may write anywhere, but for this."""


class Sidecar:
    """One process of `shardboot sidecar`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._unheard = ""
        line = self.wait_for("sidecar.listening")
        (self.url,) = re.findall(r"http://[\d.]+:\d+", line)

    def wait_for(self, event: str) -> str:
        """Wait until it says a line of this event, after those that were waited for; return it."""
        assert self.process.stderr is not None
        descriptor, deadline = self.process.stderr.fileno(), time.monotonic() + SECONDS
        while not (found := re.search(rf"^shardboot: {event}: .*\n", self._unheard, re.MULTILINE)):
            ready = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"no {event} within {SECONDS} s; it said:\n{self.said}"
            data = os.read(descriptor, 65_536).decode()
            assert data, f"it has ended, without {event}; it said:\n{self.said}"
            self.said += data
            self._unheard += data
        self._unheard = self._unheard[found.end() :]
        return found[0]

    def get(self, path: str) -> tuple[int, str]:
        try:
            return self._ask(path)
        except http.client.IncompleteRead:
            # On a busy machine the sidecar, which comes last, cuts an answer after its few seconds.
            return self._ask(path)

    def post(self, path: str, token: str) -> int:
        return self._ask(path, method="POST", headers={"Authorization": f"Bearer {token}"})[0]

    def _ask(self, path: str, **more: Any) -> tuple[int, str]:
        # Our own URL: one of http.
        request = urllib.request.Request(self.url + path, **more)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Return all samples, as `name{label="value"}`, their labels sorted."""
        status, text = self.get("/metrics")
        assert status == 200
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {_spelled(sample): sample.value for sample in samples}

    def wait_until(self, sample: str, least: float) -> dict[str, float]:
        """Ask until a sample has come to `least`; return all of them."""
        deadline = time.monotonic() + SECONDS
        while (found := self.metrics()).get(sample, 0) < least:
            assert time.monotonic() < deadline, f"{sample} is {found.get(sample)}:\n{self.said}"
        return found

    def _has(self) -> tuple[int, int]:
        proc = Path(f"/proc/{self.process.pid}")
        return len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    def keeps(self) -> tuple[int, int]:
        """Return how many descriptors and threads it has between two pieces of work."""
        looks = [self._has() for _ in range(LOOKS)]
        return min(fds for fds, _ in looks), min(threads for _, threads in looks)

    def wait_until_it_has(self, fds: int, threads: int) -> None:
        """Wait until it has no more than so many descriptors and threads at once."""
        deadline = time.monotonic() + SECONDS
        while (found := self._has()) > (fds, threads) or found[1] > threads:
            assert time.monotonic() < deadline, f"{found} descriptors and threads"

    def threads_given(self, number: int) -> int:
        """Return how many threads a signal may come to."""
        masks = [
            int(re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text())[0], 16)
            for task in Path(f"/proc/{self.process.pid}/task").iterdir()
        ]
        return sum(not mask >> (number - 1) & 1 for mask in masks)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; return the exit status, and the seconds that it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=SECONDS)
        self.said += said
        return self.process.returncode, time.monotonic() - started


def _spelled(sample: Any) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else str(sample.name)


@contextmanager
def sidecar(house: House, *words: object, launch: str = HASTY, **more: Any) -> Iterator[Sidecar]:
    """Run one that looks all the time, until the block ends."""
    more.setdefault("SHARDBOOT_SHARED", house.shared)
    process = house.start("sidecar", *OFTEN, *words, launch=launch, **more)
    running = Sidecar(process)
    try:
        yield running
    finally:
        if process.poll() is None:
            running.stop()
