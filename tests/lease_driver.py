"""One node in a queue, as a process of its own that may be stopped and killed.

python tests/lease_driver.py ROOT LIMIT TTL      says what it comes to; goes on at a line on stdin
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from entrypoint.store import lease
from entrypoint.store.lease import Pace

WHAT = "a-key"
TTL = 60.0


def pace(ttl: float = TTL) -> Pace:
    return Pace(beat=0.05, ttl=ttl, settle=0.1, poll=0.05)


class Node:
    """A process that stands in line from here on, and keeps its turn until it is let go."""

    def __init__(self, root: Path, limit: int = 1, ttl: float = TTL) -> None:
        self.directory = root / lease.LEASES / WHAT
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
        waited: lease.Waited[str] = ticket.wait(int(limit), 60)
        print(waited.how, time.monotonic(), flush=True)
        sys.stdin.readline()
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
