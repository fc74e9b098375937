"""Writing down what a boot is at: at every phase, and every second of a long one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from entrypoint.checkpoint.digest import Json
from entrypoint.state import status
from entrypoint.state.status import Address, Server, Status

PROGRESS_SECONDS: Final = 1.0
"""Between two writes about one phase."""

MAX_TEXT: Final = 500


class Reporter:
    """Keeps the status file of one boot; without a `root`, or where it cannot, it keeps none."""

    def __init__(self, root: Path | None, boot: str, address: Address) -> None:
        self.root = root
        self.is_kept = root is not None
        self.status = Status(boot=boot, started=round(time.time(), 3), address=address)
        if root is not None:
            self.know(server=Server.this())
            status.forget_oldest(root)
        self._begun = self._written = time.monotonic()
        self._past: list[Json] = []
        self._done = 0

    @property
    def phases(self) -> list[Json]:
        """All phases but vLLM's, as the ledger keeps them; the last one may go on."""
        at, since = self.status.phase, self.status.since
        if at in ("", "starting"):
            return [*self._past]
        now: dict[str, Json] = {"phase": at, "start": since, "end": round(time.time(), 3)}
        return [*self._past, now | ({"bytes": self._done} if self._done else {})]

    def know(self, **facts: Any) -> None:
        """Learn what the next write shall say: `action`, `tier`, `reason`, `address` and such."""
        self.status = self.status._replace(**facts)

    def phase(self, phase: str, text: str = "", **facts: Any) -> None:
        """Say that a phase begins, or what it is at now."""
        self.know(text=text[:MAX_TEXT], **facts)
        if phase != self.status.phase:
            self._past, self._done = self.phases, 0
            now = round(time.time(), 3)
            self.know(phase=phase, since=now, done=0, total=0, eta=0.0)
            self._begun = time.monotonic()
        self._write()

    def progress(self, done: int, total: int) -> None:
        """Say how far the phase is, in bytes; most calls cost nothing."""
        self._done = done
        now = time.monotonic()
        if now - self._written < PROGRESS_SECONDS:
            return
        if not done:
            # What comes before the first byte says nothing about the pace.
            self._begun = now
        left = max(0, total - done) * (now - self._begun) / done if done else 0.0
        self.know(done=done, total=total, eta=round(left, 1))
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self.root is None:
            return
        self.know(updated=round(time.time(), 3))
        try:
            status.write(self.root, self.status)
        except OSError:
            self.is_kept = False
