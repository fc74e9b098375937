"""The supervisor: keeps a standby, starts server after server, and is what a first process must be.

It is small and has one thread: boots, which look at stores and copy, are forks of it that become
the server, or hand it to a fork of the standby, which it then adopts. All that dies is reaped.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from entrypoint.assess import Boot
from entrypoint.state import process
from entrypoint.state.status import Server
from entrypoint.supervise import offspring
from entrypoint.supervise.notify import be_patient
from entrypoint.supervise.restart import End, GiveUp, follow
from entrypoint.supervise.signals import STOPS, Signals
from entrypoint.supervise.spare import BUSY_SECONDS, Spare
from entrypoint.supervise.watched import Watched, note

FORK_SECONDS: Final = 1.0
"""Between two tries where no process is to be had."""

CLEAR_SECONDS: Final = 5.0
CLEAR_TICK_SECONDS: Final = 0.1
"""Between two looks at what SIGKILL has not yet ended."""

TRACKER_SECONDS: Final = 1.0
"""For what clears up after the others to end by itself."""

STUMBLE_SECONDS: Final = 1.0
"""Before the next look, where nothing could be seen."""


class Supervisor:
    """Runs one model's servers, one after the other."""

    def __init__(self, first: Boot, another: Callable[[Boot], Boot]) -> None:
        self.first, self.another = first, another
        self.settings, self.log = first.settings, first.log
        self.this = Server.this()
        self.spare = Spare(first)
        # Whoever became this process may have had children: they are none of ours.
        self.spared = offspring.named(offspring.of(self.this.pid))
        self.signals = Signals()
        self.ended: dict[int, int] = {}
        self.stopping, self.killing_at, self.is_reloading = 0, math.inf, False
        self.stumbled: set[int | None] = set()

    def run(self) -> Boot:
        """Return a boot to perform, in a fork of its own; only SystemExit ends the supervisor."""
        process.adopt_orphans()
        boot, row = self.first, 0
        while True:
            self._prepare()
            pid, pipe = self._fork()
            if not pid:
                return self._as_boot(boot, pipe)
            end = self._watch(boot, pid, pipe)
            row = self._go_on(boot, end, row)
            boot = self.another(self.first)

    def _prepare(self) -> None:
        """Have a standby that is what is installed; wait for one that is busy, but not for ever."""
        self.spare.look()
        until = time.monotonic() + BUSY_SECONDS
        while self.spare.is_awaited and (left := until - time.monotonic()) > 0:
            self._idle(left, "restarting: waiting for the standby")
            # A start at once is what is under way.
            self._is_urged()
        self.spare.prepare()

    def _fork(self) -> tuple[int, int]:
        """Fork; return the pid, 0 in the fork, and its end of a pipe from there to here.

        Where no process is to be had, try again until one is.
        """
        is_said = False
        while True:
            try:
                return self.signals.fork_with_pipe()
            except OSError as error:
                if not is_said:
                    self.log.line("server.unborn", f"no process is to be had: {error.strerror}")
                is_said = True
                self._sleep(FORK_SECONDS, "restarting: no process is to be had")

    def _as_boot(self, boot: Boot, tells: int) -> Boot:
        """In the fork: be as a boot without a supervisor, but for where vLLM will run."""
        # What a terminal sends to all of a group, a boot hears from the supervisor.
        os.setpgid(0, 0)
        process.die_with_parent(signal.SIGTERM)
        boot.status.know(server=Server.this(), supervisor=self.this)
        return boot._replace(seat=self.spare.seat(boot, tells))

    def _watch(self, boot: Boot, pid: int, hears: int) -> End:
        """Look after a boot, and the server that it becomes, until that has ended."""
        server = Watched(boot, pid, hears, self.first.environ, self.settings.hang_timeout)
        self.ended.clear()
        self.killing_at = self.spare.learning_at = math.inf
        while server.pid not in self.ended and not server.cause:
            try:
                self._turn(server)
            except OSError as error:
                self._stumble(error)
        self._clear(server)
        status = self.ended.get(server.pid, signal.SIGKILL)
        end = server.end(os.waitstatus_to_exitcode(status))
        if server.is_fork:
            self.spare.judge(end, is_told=self.is_told)
        return end

    def _turn(self, server: Watched) -> None:
        """Wait for something to happen, and do what is to be done about it."""
        until = min(self.killing_at, self.spare.learning_at) - time.monotonic()
        server.mourn(self._wait(min(server.health.wait(), until), *server.descriptors))
        for number in self.signals.heard():
            self._pass_on(server, number)
        self._reap()
        if server.hear():
            self._adopt(server)
        if server.has_told:
            # Nobody asks about others, and their numbers may come again.
            self.ended = {n: status for n, status in self.ended.items() if n == server.pid}
        if server.pid in self.ended:
            return
        pid = server.pid if server.began else None
        server.health.look(pid, is_ending=self.killing_at < math.inf)
        was_seen = server.is_seen
        server.see(self._left)
        if server.is_seen and not was_seen:
            self.spare.learn_later()
        self.spare.learn()
        if why := self._must_go(server):
            self.killing_at, server.cause = math.inf, why
            self._kill(server, spares_trackers=True)

    def _must_go(self, server: Watched) -> str:
        """Say why the server must be ended, if it must."""
        if time.monotonic() > self.killing_at:
            return "it did not stop in time"
        if self.is_told:
            # What it has begun it may finish, listening no more.
            return ""
        if server.health.is_lost:
            return "one of its processes had died"
        return "it hung" if server.health.hangs else ""

    def _adopt(self, server: Watched) -> None:
        """Take the fork for the server that a boot has just told of."""
        if process.started(server.pid) is not None:
            # Whoever has died had the number before it.
            self.ended.pop(server.pid, None)
        if self.is_told:
            # The boot was told, and perhaps too late.
            self._pass_on(server, self.stopping or signal.SIGHUP)

    def _pass_on(self, server: Watched, number: int) -> None:
        """Do with a signal what a first process should: hand it on, and bound what it takes."""
        self._heed(number)
        self.killing_at = min(self.killing_at, time.monotonic() + self.settings.stop_timeout)
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM if number == signal.SIGHUP else number)

    @property
    def is_told(self) -> bool:
        """Whether somebody wants the server to end."""
        return bool(self.stopping or self.is_reloading)

    def _heed(self, number: int) -> None:
        """Remember what a signal asks for, once the server has ended."""
        if number in STOPS:
            self.stopping = number
        self.is_reloading = number == signal.SIGHUP

    def _left(self) -> list[int]:
        """Return what runs of the server: all that descends from here but what was here before it.

        Raises: OSError where nobody can tell.
        """
        self.spared = offspring.living(self.spared)
        return offspring.of(self.this.pid, self.spare.pids | self.spared.keys())

    def _kill(self, server: Watched, *, spares_trackers: bool) -> list[int]:
        """Kill the server with all its processes; return for whom to wait.

        That is itself if nobody can tell, and none whom no waiting ends.
        """
        try:
            left = self._left()
        except OSError as error:
            if server.pid not in self.ended:
                offspring.kill([server.pid])
            self._stumble(error)
            return [server.pid]
        server.kill(left, spares_trackers=spares_trackers)
        return [pid for pid in left if not (offspring.is_look(pid) or offspring.is_foreign(pid))]

    def _clear(self, server: Watched) -> None:
        """End what is left of a server, and wait until its memory and its port are free.

        For what not even SIGKILL ends somebody who wants us to end need not wait as well.
        """
        said_at = time.monotonic() + CLEAR_SECONDS
        clears_until = time.monotonic() + TRACKER_SECONDS
        while left := self._kill(server, spares_trackers=time.monotonic() < clears_until):
            self._idle(CLEAR_TICK_SECONDS, "restarting: waiting for what is left of the server")
            for number in self.signals.heard():
                self._heed(number)
            if time.monotonic() > said_at:
                said_at = math.inf
                self.log.line("server.stuck", f"SIGKILL has not ended {left}: waiting for them")
            if self.stopping and said_at == math.inf:
                break
        self._reap()
        server.clear()

    def _go_on(self, boot: Boot, end: End, row: int) -> int:
        """Note an end, and wait until it is time for the next start; or be through."""
        note(boot, end, is_told=self.is_told)
        if self.stopping:
            self._leave(end.status)
        if self.is_reloading:
            self.is_reloading = False
            self.log.line("server.reload", f"{end.text}, as SIGHUP asked; starting the next one")
            return 0
        then = follow(end, row, self.settings.max_restarts, self.settings.restart_delay)
        if isinstance(then, GiveUp):
            self.log.line("server.gave-up", then.text)
            self._leave(then.status)
        when = f"in {then.delay:.0f} s" if then.delay else "now"
        text = f"{end.text}; starting the next one {when}"
        self.log.line("server.ended", text)
        self._sleep(then.delay, f"restarting: {text}")
        return then.number

    def _sleep(self, seconds: float, line: str) -> None:
        """Wait before a start, unless told to stop, or to start at once."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._idle(left, line)
            if self._is_urged():
                return

    def _is_urged(self) -> bool:
        """Whether SIGHUP has come, which wants a start at once; told to stop, end."""
        heard = self.signals.heard()
        for number in heard:
            if number in STOPS:
                self._leave(128 + number)
        return bool(heard)

    def _idle(self, seconds: float, line: str) -> None:
        """Wait while there is no server to look at, and let systemd hear that this is no hang."""
        try:
            self._wait(min(seconds, be_patient(self.first.environ, line)))
        except OSError as error:
            self._stumble(error)
        self._reap()

    def _stumble(self, error: OSError) -> None:
        """Go on where the machine has failed us: no reason to leave a server, or to end one."""
        if error.errno not in self.stumbled:
            self.stumbled.add(error.errno)
            self.log.line("server.unwatched", f"nothing can be seen at the moment: {error}")
        time.sleep(STUMBLE_SECONDS)

    def _leave(self, status: int) -> NoReturn:
        self.spare.end()
        raise SystemExit(status)

    def _wait(self, seconds: float, *descriptors: int) -> set[int]:
        """Wait until something happens: a signal, a word of a boot or of the standby, a death.

        Return which of the descriptors tell of something.
        """
        poll, channels = select.poll(), self.spare.channels
        for descriptor in (self.signals.wakes, *channels, *descriptors):
            poll.register(descriptor, select.POLLIN)
        milliseconds = None if seconds == math.inf else max(0.0, seconds) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(milliseconds)}
        if not ready.isdisjoint(channels):
            self.spare.hear(is_stopping=bool(self.stopping))
        return ready

    def _reap(self) -> None:
        """Reap whatever has died, and remember how: nobody else would."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.ended[pid] = status
