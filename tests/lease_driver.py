"""A queue of nodes, each a process of its own that may be stopped and killed.

python tests/lease_driver.py ROOT LIMIT TTL      says what it comes to; goes on at a line on stdin
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from entrypoint.store import lease
from entrypoint.store.lease import LEASES, Pace, Waited

WHAT = "a-key"
TTL = 60.0

SOON = 0.5
"""A time to live that a test can wait for."""

BOUND = 30.0


def pace(ttl: float = TTL) -> Pace:
    return Pace(beat=0.05, ttl=ttl, settle=0.1, poll=0.05)


def names(root: Path) -> list[str]:
    """Return who stands in line; a line that nobody stands in is taken away."""
    directory = root / LEASES / WHAT
    return sorted(os.listdir(directory)) if directory.exists() else []


def plant(root: Path, name: str, content: bytes = b"0000000001 1 elsewhere another-boot\n") -> Path:
    path = root / LEASES / WHAT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def wait(root: Path, ttl: float = 60, seconds: float = BOUND) -> tuple[str, list[str]]:
    told: list[str] = []
    with lease.queue(root, WHAT, pace=pace(ttl)) as ticket:
        waited: Waited[str] = ticket.wait(1, seconds, on_wait=told.append)
    return waited.how, told


class Node:
    """A process that stands in line from here on, and keeps its turn until it is let go."""

    def __init__(self, root: Path, limit: int = 1, ttl: float = TTL) -> None:
        self.directory = root / LEASES / WHAT
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(limit), str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert self.hear() == "in line"

    def hear(self) -> str:
        """Return the next thing it says, however long that takes; "" at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def had_turn(self) -> float:
        """Wait for its turn; return when it came."""
        how, _, moment = self.hear().partition(" ")
        assert how == "turn"
        return float(moment)

    def let_go(self) -> float:
        """Let it leave, and return when it began to."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        moment = float(self.hear())
        assert self.process.wait() == 0
        return moment

    @property
    def tickets(self) -> list[str]:
        """The names of its tickets, as this process sees them."""
        return [each.name for each in self.directory.glob(f"*.*.{self.process.pid}.*")]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def main(root: str, limit: str, ttl: str) -> None:
    with lease.queue(Path(root), WHAT, pace=pace(float(ttl))) as ticket:
        print("in line", flush=True)
        waited: Waited[str] = ticket.wait(int(limit), 60)
        print(waited.how, time.monotonic(), flush=True)
        sys.stdin.readline()
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
