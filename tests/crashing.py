"""Killing a server under a supervisor again and again, at random moments: it must come back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from killing import LIMIT_SECONDS, POLL_SECONDS, listener, wait_for_another
from processes import ProgramError, descendants
from serving import Answer, Server

from entrypoint.checkpoint.digest import Json
from entrypoint.state.ledger import Ledger
from entrypoint.supervise.offspring import shared_memory

PROMPT: Final = "The first word"
CLIENTS: Final = 4
"""Who ask all at once, for a server under load."""

WITH_STANDBY: Final = 0.05
"""How often the standby is killed as well."""

FIRST: Final = "first process"
"""A boot, or the API server that it became."""

FOR_EVER: Final = (
    *("--max-restarts", "0", "--restart-delay", "0"),
    *("--quarantine-after", "1000000"),
)
"""Options of `serve`: a checkpoint is not to blame for these deaths."""


class Held(NamedTuple):
    """What must not grow from server to server; memory in KiB."""

    descriptors: int
    processes: int
    zombies: int
    segments: int
    supervisor_rss: int
    standby_pss: int

    @classmethod
    def of(cls, supervisor: int, standby: int) -> Held:
        """Look at a supervisor while it serves (proc(5))."""
        proc = Path(f"/proc/{supervisor}")
        states = [_stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return cls(
            descriptors=len(list((proc / "fd").iterdir())),
            processes=len(descendants(supervisor)),
            zombies=sum(stat[:2] == ["Z", str(supervisor)] for stat in states),
            segments=len(segments(supervisor)),
            supervisor_rss=_kib(proc / "smaps_rollup", "Rss"),
            standby_pss=_kib(Path(f"/proc/{standby}/smaps_rollup"), "Pss"),
        )


def segments(supervisor: int) -> set[str]:
    """Return the names of what is shared in its own /dev/shm."""
    return {path.name for path in Path(f"/proc/{supervisor}/root/dev/shm").iterdir()}


class Crashes:
    """Kills parts of the servers of one supervisor; a seed tells which, and when."""

    def __init__(self, server: Server, model: Path, state: Path, seed: int) -> None:
        """Wait until the first one serves, and ask it: all others must answer alike."""
        self.server, self.model, self.ledger = server, str(model), Ledger(state)
        self.supervisor = server.process.pid
        self.random = random.Random(seed)  # noqa: S311 - nothing secret
        self.serves, _ = wait_for_another(server, None)
        self.answer = self._ask()
        self.served = 1
        self.doomed: set[int] = set()
        self.killed: Counter[str] = Counter()
        self.is_calm = True

    def run(self, count: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Kill so many times, and see the last one serve. Raises: ProgramError."""
        moments: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "starting": self._starts,
            "loading": self._loads,
            "serving": self._serves,
            "under load": self._is_loaded,
        }
        for number in range(count):
            moment = self.random.choice(list(moments))
            with moments[moment]():
                self.serves = listener(self.supervisor, self.server.port) or self.serves
                part = self._kill(with_standby=self.random.random() < WITH_STANDBY)
            self.killed[f"{part}, {moment}"] += 1
            self.is_calm = False
            say(f"{number + 1} of {count}: {part}, {moment}; {self.served} have served")
        self._wait()

    def held(self) -> Held:
        """Return what supervisor and standby hold."""
        return Held.of(self.supervisor, min(self._standbys()))

    def unmapped(self) -> list[str]:
        """Return what lies in the supervisor's /dev/shm though no process of its has it mapped."""
        mapped = {Path(path).name for path in shared_memory(descendants(self.supervisor))}
        return sorted(segments(self.supervisor) - mapped)

    @contextmanager
    def _starts(self) -> Iterator[None]:
        time.sleep(self.random.uniform(0, 3))
        yield

    @contextmanager
    def _loads(self) -> Iterator[None]:
        deadline, before = time.monotonic() + LIMIT_SECONDS, self._last_load()
        while not self.is_calm and self._last_load() == before and not self._is_another():
            if time.monotonic() > deadline:
                raise ProgramError(f"nothing loads:\n{self.server.last_lines()}")
            time.sleep(POLL_SECONDS)
        time.sleep(self.random.uniform(0, 0.3))
        yield

    @contextmanager
    def _serves(self) -> Iterator[None]:
        self._wait()
        time.sleep(self.random.uniform(0, 1))
        yield

    @contextmanager
    def _is_loaded(self) -> Iterator[None]:
        self._wait()
        clients = [threading.Thread(target=self._ask_until_it_dies) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(self.random.uniform(0, 1))
        yield
        for client in clients:
            client.join()

    def _wait(self) -> None:
        """Wait until another one serves than was killed, and see that it answers alike."""
        if self.is_calm:
            return
        self.serves, _ = wait_for_another(self.server, self.serves)
        while self.serves in self.doomed:
            # It is healthy, and has not noticed yet that a part of it was killed as it began.
            self.serves, _ = wait_for_another(self.server, self.serves)
        self.served += 1
        if (answer := self._ask()) != self.answer:
            raise ProgramError(f"{answer} instead of {self.answer}")
        self.is_calm = True

    def _ask(self) -> Answer:
        return self.server.complete(self.model, PROMPT)

    def _ask_until_it_dies(self) -> None:
        with suppress(ProgramError):
            while True:
                self._ask()

    def _is_another(self) -> bool:
        return self.server.is_healthy() and (
            listener(self.supervisor, self.server.port) != self.serves
        )

    def _last_load(self) -> Json:
        """Return the boot that has last begun to load."""
        loads = [entry for entry in self.ledger.entries() if entry.get("event") == "loading"]
        return loads[-1].get("boot") if loads else None

    def _kill(self, *, with_standby: bool) -> str:
        """Kill one of the parts that there are, and the standby as well or not; return which."""
        spare = self._standbys() if with_standby else []
        for pid in spare:
            os.kill(pid, signal.SIGKILL)
        return self._kill_part() + (" and standby" if spare else "")

    def _kill_part(self) -> str:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            parts = self._parts()
            if parts:
                pid = self.random.choice(sorted(parts))
                with suppress(ProcessLookupError):
                    self.doomed.add(self._first_above(pid))
                    os.kill(pid, signal.SIGKILL)
                    return parts[pid]
            time.sleep(POLL_SECONDS)
        raise ProgramError(f"there is nothing to kill:\n{self.server.last_lines()}")

    def _first_above(self, pid: int) -> int:
        """Return the first process of the server that a part is of."""
        while (parent := _stat(pid)[1:2]) and parent != [str(self.supervisor)]:
            pid = int(parent[0])
        return pid

    def _parts(self) -> dict[int, str]:
        """Return boot or API server, engine core and workers by pid, and what they are."""
        standbys, found = self._standbys(), {}
        for pid in descendants(self.supervisor):
            with suppress(OSError):
                _, _, title = _words(pid).partition("VLLM::")
                if title:
                    found[pid] = title.partition("_")[0].strip("\0 ")
                elif _stat(pid)[1] == str(self.supervisor) and pid not in standbys:
                    found[pid] = FIRST
        return found

    def _standbys(self) -> list[int]:
        """Return the standby: it alone of its kind is none of the ledger's servers."""
        servers = {e.get("pid") for e in self.ledger.entries() if e.get("event") == "attempt"}
        found = []
        for pid in descendants(self.supervisor):
            with suppress(OSError):
                is_one = "vllm_plugin.standby" in _words(pid) and pid not in servers
                if is_one and _stat(pid)[1] == str(self.supervisor):
                    found.append(pid)
        return found


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def _stat(pid: int) -> list[str]:
    """Return state and parent, and what follows, of a process; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _kib(path: Path, name: str) -> int:
    lines: Any = (line.split() for line in path.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == f"{name}:")
