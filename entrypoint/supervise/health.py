"""How the server under supervision is, and telling systemd so."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

from entrypoint.assess import Boot
from entrypoint.health.ask import ask
from entrypoint.health.check import check
from entrypoint.health.listener import numeric
from entrypoint.state import status as statuses
from entrypoint.state.ledger import Ledger
from entrypoint.state.status import Server, Status
from entrypoint.supervise.notify import PATIENCE, STALL_SECONDS, notify, patience

TICK_SECONDS: Final = 0.2
"""Between two looks until it serves."""

STEADY_TICK_SECONDS: Final = 5.0
"""And afterwards, where somebody wants to know."""

ASK_SECONDS: Final = 1.0
ALARM_SECONDS: Final = 10.0
ALARM_TICK_SECONDS: Final = 0.05
FALL_SECONDS: Final = 20.0
"""For one that has not served yet to end by itself, and to say why, without one of its processes.

vLLM 0.32 waits for ever for a worker that dies between being ready and its queues being so.
"""

UNAVAILABLE: Final = 503
MAX_MISSES: Final = 5
SERVED: Final = ("serving", "healthy")
"""What the ledger says of a boot that has come so far."""


class Health:
    """Looks at one boot, as often as there is something to find out."""

    def __init__(self, boot: Boot, environ: Mapping[str, str], hang_seconds: float) -> None:
        self.root, self.boot = boot.settings.state_dir, boot
        self.environ, self.hang_seconds = environ, hang_seconds
        self.served_since: float | None = None
        self.answered = self.moved = time.monotonic()
        self.place: tuple[str, int] = ("", 0)
        self.line = ""
        self.next = self.alarmed_until = 0.0
        self.has_left, self.misses, self.falls_at = False, 0, math.inf

    @property
    def served(self) -> float | None:
        """For how many seconds it has been seen to serve; None where it never did.

        Others look, too, and vLLM itself notes it: what lies between two looks here is no time.
        """
        if self.served_since is not None:
            return time.monotonic() - self.served_since
        notes = Ledger(self.root).recent_of(self.boot.log.boot)
        return 0.0 if any(note.get("event") in SERVED for note in notes) else None

    def alarm(self) -> None:
        """Look at once, and often for a while: one of the server's processes has died.

        Before it serves there is nothing to look at but whether it ends.
        """
        if self.served_since is None:
            self.falls_at = min(self.falls_at, time.monotonic() + FALL_SECONDS)
            return
        self.alarmed_until = time.monotonic() + ALARM_SECONDS
        self.next = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether it is of no use any more without a process of its that has died."""
        return self.has_left or time.monotonic() > self.falls_at

    @property
    def hangs(self) -> bool:
        """Whether it has served, and has not answered for too long."""
        silent = time.monotonic() - self.answered
        return self.served_since is not None and silent > self.hang_seconds

    def wait(self) -> float:
        """Return the seconds until the next look."""
        return max(0.0, self.next - time.monotonic())

    def look(self, server: int | None, *, is_ending: bool) -> None:
        """Look if it is time; say what is new. `server` is vLLM's pid, once it has begun.

        `is_ending`: it was told to, and has only so much time for it.
        """
        now = time.monotonic()
        if now < self.next:
            return
        # Also where this look fails.
        self.next = now + TICK_SECONDS
        status = statuses.read(self.root, self.boot.log.boot) or self.boot.status.status
        if server is not None and status.phase != "starting":
            # Where no status can be kept, the supervisor still knows.
            status = status._replace(phase="starting", server=Server.of(server))
        if now < self.alarmed_until and not status.address.headless:
            self._look_closely(status)
            self.next = now + ALARM_TICK_SECONDS
            return
        report = check(self.root, status, ASK_SECONDS)
        standing, place = report.standing, (report.standing.phase, status.done)
        if place != self.place:
            self.place, self.moved = place, now
        if standing.is_healthy:
            self.answered = time.monotonic()
            if self.served_since is None:
                self.served_since = self.answered
                if self.falls_at < math.inf:
                    self.falls_at = math.inf
                    self.alarm()
        is_looked_after = is_ending or self.served_since is None or math.isfinite(self.hang_seconds)
        self._tell(standing.line, is_healthy=standing.is_healthy, is_alive=is_looked_after, now=now)
        self.next = now + (TICK_SECONDS if self.served_since is None else self._steady())

    def _look_closely(self, status: Status) -> None:
        """Find out whether a server is lost that one of its processes has left.

        It says so itself, by 503, or it has begun to shut down, and listens no more.
        """
        answer = ask(numeric(status.server.pid, status.address), ASK_SECONDS)
        self.misses = self.misses + 1 if answer.is_there is False else 0
        self.has_left = answer.status == UNAVAILABLE or self.misses >= MAX_MISSES
        if answer.is_ok:
            self.answered = time.monotonic()
            self._tell(self.line, is_healthy=True, is_alive=True, now=self.answered)

    def _steady(self) -> float:
        """Return how often to look at one that serves."""
        silence = patience(self.environ)
        wanted = math.isfinite(self.hang_seconds) or math.isfinite(silence)
        return min(STEADY_TICK_SECONDS, silence, self.hang_seconds / 3) if wanted else math.inf

    def _tell(self, line: str, *, is_healthy: bool, is_alive: bool, now: float) -> None:
        """Tell systemd: that it is ready, what it is at, to be patient, and that nothing hangs.

        `is_alive`: whatever it does not do, the supervisor will see to it.
        """
        state = {"STATUS": line} if line != self.line else {}
        self.line = line
        if is_healthy:
            state["READY"] = "1"
        elif self.served_since is None and now - self.moved < STALL_SECONDS:
            state |= PATIENCE
        if is_healthy or is_alive:
            state["WATCHDOG"] = "1"
        if state:
            notify(self.environ, **state)
