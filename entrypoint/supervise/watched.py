"""A boot, and the server that it becomes, as long as it runs."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from entrypoint.assess import Boot
from entrypoint.checkpoint.digest import Json
from entrypoint.state.ledger import Ledger
from entrypoint.supervise import offspring
from entrypoint.supervise.health import Health
from entrypoint.supervise.restart import End

LOOKS: Final = 20.0
"""How much longer than a look at all processes is the time to the next one, before it serves."""


class Watched:
    """What is known of it: its pid, its other processes, and what they share."""

    def __init__(
        self, boot: Boot, pid: int, hears: int, environ: Mapping[str, str], hang_seconds: float
    ) -> None:
        """`pid` is the boot's, which tells the server's on the pipe `hears`."""
        self.boot, self.pid, self.hears = boot, pid, hears
        self.health = Health(boot, environ, hang_seconds)
        self.has_told = self.began = self.is_fork = self.is_seen = False
        self.shared: set[str] = set()
        self.segments: frozenset[str] = frozenset()
        self.is_new = False
        self.others: dict[int, int] = {}
        self.next = 0.0
        self.cause = ""

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when there is news of it."""
        return [*([] if self.has_told else [self.hears]), *self.others]

    def mourn(self, ready: set[int]) -> None:
        """Look closely for a while if one of its processes has died."""
        if died := self.others.keys() & ready:
            self._forget(died)
            self.health.alarm()

    def hear(self) -> bool:
        """Take the pid that the boot tells: that is vLLM now. Return whether it is another one.

        It is the only word; a boot that refuses ends without.
        """
        if self.has_told or not select.select([self.hears], [], [], 0)[0]:
            return False
        self.has_told = True
        if word := os.read(self.hears, offspring.MAX_PID_BYTES):
            self.began, self.is_fork = True, int(word) != self.pid
            self.pid = int(word)
        return self.is_fork

    def see(self, pids: Callable[[], Sequence[int]]) -> None:
        """Remember what it shares in memory, and its processes: who has died cannot be asked.

        Until it serves these are its engines and workers: others of its may come and go. `pids`
        tells its processes.
        """
        before, self.segments = self.segments, offspring.segments()
        # And once more: what is made is not mapped yet.
        if self.is_new or before != self.segments:
            self.is_new = before != self.segments
            self.shared |= offspring.shared_memory(pids())
        serves, now = self.health.served_since is not None, time.monotonic()
        if self.is_seen or not (serves or (self.began and now > self.next)):
            return
        known = {self.pid, *self.others.values()}
        others = [pid for pid in pids() if pid not in known]
        self.others |= offspring.watch(pid for pid in others if serves or offspring.is_engine(pid))
        self.is_seen = serves
        self.next = now + LOOKS * (time.monotonic() - now)

    def kill(self, pids: Sequence[int], *, spares_trackers: bool) -> None:
        """Kill these processes of it."""
        self.shared |= offspring.shared_memory(pids)
        offspring.kill(pid for pid in pids if not (spares_trackers and offspring.is_tracker(pid)))

    def clear(self) -> None:
        """Let go of all that it held, now that none of its processes runs."""
        offspring.forget(self.shared)
        self._forget(set(self.others))
        os.close(self.hears)

    def end(self, status: int) -> End:
        """Return how it ended; `status` is negative for a signal."""
        told = status if status >= 0 else 128 - status
        return End(told, self.health.served, self.began, self.cause)

    def _forget(self, descriptors: set[int]) -> None:
        for descriptor in descriptors:
            del self.others[descriptor]
            os.close(descriptor)


def note(boot: Boot, end: End, *, is_told: bool) -> None:
    """Leave in the ledger how a boot, or its server, ended; `is_told`: somebody wanted it to."""
    ledger, now = Ledger(boot.settings.state_dir), round(time.time(), 3)
    entry: dict[str, Json] = {"boot": boot.log.boot, "event": "ended", "status": end.status}
    ledger.append(entry | {"time": now, "told": is_told})
    if is_told:
        # Whatever vLLM made of it: that it ended so is no fault of a checkpoint.
        ledger.append({"boot": boot.log.boot, "event": "stopped", "time": now})
