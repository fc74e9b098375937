"""Servers under a supervisor, and a systemd that hears of them, for tests of both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from blackbox.harness import House
from processes import descendants
from serving import free_port


@contextmanager
def supervised(house: House, *words: object, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Serve on a hit, under a supervisor that is stopped at the end, if it still runs.

    `more` is what the house's `start` takes.
    """
    at_once = ("--standby", "--restart-delay", "0")
    port = ("--port", free_port())
    process = house.start("serve", *at_once, *words, house.model, "-tp", 2, *port, **more)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        if process.stdout is not None and not process.stdout.closed:
            house.finish(process)


def server_of(house: House) -> dict[str, Any]:
    """Return what the latest server has seen of itself."""
    pid = house.attempts[-1]["pid"]
    found: dict[str, Any] = json.loads((house.root / "dumps" / f"{pid}.json").read_text())
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    # /proc/PID/task/PID/children leaves some out while one of them exits.
    return [child for child in descendants(pid) if parent(child) == pid]


def ends(house: House) -> list[int]:
    return [entry["status"] for entry in house.ledger if entry["event"] == "ended"]


def wait_for_server(house: House, event: str = "listening") -> int:
    house.wait_for(event)
    if event == "listening":
        assert house.run("wait").status == 0
    pid: int = house.attempts[-1]["pid"]
    return pid


def descriptors(pid: int) -> set[str]:
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


def wait_for_health(house: House, supervisor: int) -> None:
    """Wait until it has seen the server healthy: from then on it watches all its processes."""
    while "anon_inode:[pidfd]" not in descriptors(supervisor):
        assert house.run("health").status == 0


def wait_for_line(process: subprocess.Popen[str], event: str) -> str:
    """Wait until the supervisor says something; return the line."""
    assert process.stderr is not None
    return next(line for line in process.stderr if f"shardboot: {event}:" in line)


class Systemd:
    """A service's manager, as far as it listens (sd_notify(3))."""

    def __init__(self, path: Path, watchdog_seconds: float = 0.0) -> None:
        self.path = path
        self.environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": f"{watchdog_seconds * 1e6:.0f}"}

    def __enter__(self) -> Self:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(self.path))
        self.channel.settimeout(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hear(self) -> dict[str, str]:
        """Return what is told next."""
        lines = self.channel.recv(65_536).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def wait_for(self, name: str, beginning: str) -> list[dict[str, str]]:
        """Return all that is told until something is told that begins so, which is the last."""
        told = [self.hear()]
        while not told[-1].get(name, "").startswith(beginning):
            told.append(self.hear())
        return told
