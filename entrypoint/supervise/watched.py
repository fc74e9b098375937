"""A boot, and the server that it becomes, as long as it runs."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence

from entrypoint.assess import Boot
from entrypoint.checkpoint.digest import Json
from entrypoint.state.ledger import Ledger
from entrypoint.supervise import offspring
from entrypoint.supervise.health import Health
from entrypoint.supervise.restart import End


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
        self.others: set[int] = set()
        self.cause = ""

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when there is news of it."""
        return [*([] if self.has_told else [self.hears]), *self.others]

    def mourn(self, ready: set[int]) -> None:
        """Look closely for a while if one of its processes has died."""
        if died := self.others & ready:
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
        """Remember its other processes, once it serves: who is killed later cannot be asked.

        What it shares in memory is looked for before as well, whenever the segments there have
        changed. `pids` tells its processes.
        """
        if (segments := offspring.segments()) != self.segments:
            self.segments = segments
            self.shared |= offspring.shared_memory(pids())
        if not self.is_seen and self.health.served_since is not None:
            self.others = offspring.watch(pid for pid in pids() if pid != self.pid)
            self.is_seen = True

    def kill(self, pids: Sequence[int], *, spares_trackers: bool) -> None:
        """Kill these processes of it."""
        self.shared |= offspring.shared_memory(pids)
        offspring.kill(pid for pid in pids if not (spares_trackers and offspring.is_tracker(pid)))

    def clear(self) -> None:
        """Let go of all that it held, now that none of its processes runs."""
        offspring.forget(self.shared)
        self._forget(self.others)
        os.close(self.hears)

    def end(self, status: int) -> End:
        """Return how it ended; `status` is negative for a signal."""
        told = status if status >= 0 else 128 - status
        return End(told, self.health.served, self.began, self.cause)

    def _forget(self, descriptors: set[int]) -> None:
        self.others = self.others - descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def note(boot: Boot, end: End, *, is_told: bool) -> None:
    """Leave in the ledger how a boot, or its server, ended; `is_told`: somebody wanted it to."""
    ledger, now = Ledger(boot.settings.state_dir), round(time.time(), 3)
    entry: dict[str, Json] = {"boot": boot.log.boot, "event": "ended", "status": end.status}
    ledger.append(entry | {"time": now, "told": is_told})
    if is_told:
        # Whatever vLLM made of it: that it ended so is no fault of a checkpoint.
        ledger.append({"boot": boot.log.boot, "event": "stopped", "time": now})
