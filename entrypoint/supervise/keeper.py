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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from entrypoint.assess import Boot
from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.engine.executable import find
from entrypoint.errors import ShardbootError
from entrypoint.state.ledger import Ledger
from entrypoint.state.status import Server
from entrypoint.supervise import family
from entrypoint.supervise.health import Health
from entrypoint.supervise.standby import Standby, StandbySeat
from entrypoint.supervise.verdict import End, GiveUp, follow

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
HEARD: Final = (signal.SIGCHLD, signal.SIGHUP, *STOPS)
LEARN_SECONDS: Final = 20.0
"""After a server is healthy: by then its first requests have imported what they need."""

MAX_PID_BYTES: Final = 32
FORK_SECONDS: Final = 5.0
CLEAR_SECONDS: Final = 10.0
CLEAR_TICK_SECONDS: Final = 0.1
"""Between two looks at what SIGKILL has not yet ended."""


class Keeper:
    """Runs one model's servers, one after the other."""

    def __init__(self, first: Boot, another: Callable[[Boot], Boot]) -> None:
        self.first, self.another = first, another
        self.settings, self.log = first.settings, first.log
        self.this = Server.this()
        self.standby: Standby | None = None
        self.distrusted, self.is_proved = "", False
        self.server = 0
        self.ended: dict[int, int] = {}
        self.stopping, self.killing_at, self.learning_at = 0, math.inf, math.inf
        self.is_reloading = False
        self.shared: set[str] = set()
        self.others: set[int] = set()
        self.wakes, self.woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> Boot:
        """Return a boot to perform, in a fork of its own; only SystemExit ends the supervisor."""
        family.adopt_orphans()
        # What a parent ignores stays ignored, as nohup wants it.
        heard = [n for n in HEARD if n == signal.SIGCHLD or signal.getsignal(n) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, _heard) for number in heard}
        signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)
        boot, row = self.first, 0
        while True:
            self._prepare_standby()
            hears, tells = os.pipe2(os.O_CLOEXEC)
            # Until its handlers are its own, the fork would write into the supervisor's pipe.
            signal.pthread_sigmask(signal.SIG_BLOCK, heard)
            pid = self._fork()
            if not pid:
                os.close(hears)
                return self._as_boot(boot, tells, handlers)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
            os.close(tells)
            end = self._watch(boot, pid, hears)
            row = self._go_on(boot, end, row)
            boot = self.another(self.first)

    def _fork(self) -> int:
        """Fork; where no process is to be had, try again until one is."""
        while True:
            try:
                return os.fork()
            except OSError as error:
                self.log.line("server.unborn", f"no process is to be had: {error.strerror}")
                self._sleep(FORK_SECONDS)

    def _as_boot(self, boot: Boot, tells: int, handlers: Mapping[signal.Signals, Any]) -> Boot:
        """In the fork: be as a boot without a supervisor, but for where vLLM will run."""
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # Its server is a process group, so that what is left of it can be found.
        os.setpgid(0, 0)
        family.die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        boot.status.know(server=Server.this(), supervisor=self.this)
        channel = self.standby.channel if self.standby else None
        return boot._replace(seat=StandbySeat(channel, tells, boot.log))

    def _watch(self, boot: Boot, pid: int, hears: int) -> End:
        """Look after a boot, and the server that it becomes, until that has ended."""
        health = Health(boot, self.first.environ, self.settings.hang_timeout)
        self.server, self.killing_at, self.learning_at = pid, math.inf, math.inf
        began, is_seen, cause, words = False, False, "", [hears]
        while self.server not in self.ended:
            until = min(self.killing_at, self.learning_at) - time.monotonic()
            ready = self._wait(min(health.wait(), until), *words, *self.others)
            if died := self.others & ready:
                self._forget(died)
                health.alarm()
            for number in self._heard():
                self._pass_on(number)
            self._reap()
            if words and _is_readable(hears):
                # The only word is the server's pid; a boot that refuses ends without one.
                words.clear()
                began = self._begins(os.read(hears, MAX_PID_BYTES))
            if self.server in self.ended:
                break
            health.look(self.server if began else None)
            if not is_seen and health.served_since is not None:
                is_seen = True
                # Who is killed later cannot be asked any more.
                others = [pid for pid in family.members(self.server) if pid != self.server]
                self.shared = family.shared_memory([self.server, *others])
                self.others = family.watch(others)
                self.learning_at = time.monotonic() + LEARN_SECONDS
            if self.standby and time.monotonic() > self.learning_at:
                self.learning_at = math.inf
                self.standby.learn()
            if why := self._must_go(health):
                self.killing_at = math.inf
                self._kill()
                cause = why
        os.close(hears)
        self._clear()
        status = os.waitstatus_to_exitcode(self.ended.pop(self.server))
        self.ended.clear()
        end = End(status if status >= 0 else 128 - status, health.served, began, cause)
        if began and self.server != pid:
            self._judge(end)
        return end

    def _must_go(self, health: Health) -> str:
        """Say why the server must be ended, if it must."""
        if time.monotonic() > self.killing_at:
            return "it did not stop in time"
        if health.is_lost and not self.stopping:
            return "one of its processes had died"
        return "it hung" if health.hangs else ""

    def _begins(self, word: bytes) -> bool:
        """Take the pid that a boot tells: that is vLLM now. Return whether there was one."""
        if not word:
            return False
        before, self.server = self.server, int(word)
        if self.server != before and (self.stopping or self.is_reloading):
            # The boot was told, and perhaps too late.
            self._pass_on(self.stopping or signal.SIGHUP)
        return True

    def _judge(self, end: End) -> None:
        """Trust the standby once one of its servers has served; not if the first ones cannot."""
        self.is_proved = self.is_proved or end.served is not None
        if not self.is_proved and not self.stopping:
            self.distrusted = "its first server died before it served"

    def _pass_on(self, number: int) -> None:
        """Do with a signal what a first process should: hand it on, and bound what it takes."""
        if number in STOPS:
            self.stopping = number
        self.is_reloading = number == signal.SIGHUP
        self.killing_at = min(self.killing_at, time.monotonic() + self.settings.stop_timeout)
        with suppress(ProcessLookupError):
            os.kill(self.server, signal.SIGTERM if number == signal.SIGHUP else number)

    def _kill(self) -> None:
        """Kill the server with all its processes."""
        self.shared |= family.shared_memory(family.members(self.server))
        family.kill(self.server)

    def _clear(self) -> None:
        """End what is left of a server, and wait until its memory and its port are free."""
        self._kill()
        said_at = time.monotonic() + CLEAR_SECONDS
        while left := family.members(self.server):
            self._wait(CLEAR_TICK_SECONDS)
            self.stopping = next((n for n in self._heard() if n in STOPS), self.stopping)
            self._reap()
            if time.monotonic() > said_at:
                said_at = math.inf
                self.log.line("server.stuck", f"SIGKILL has not ended {left}: waiting for them")
            family.kill(self.server)
        self._reap()
        family.forget(self.shared)
        self.shared = set()
        self._forget(self.others)

    def _go_on(self, boot: Boot, end: End, row: int) -> int:
        """Note an end, and wait until it is time for the next start; or be through."""
        entry: dict[str, Json] = {"boot": boot.log.boot, "event": "ended", "status": end.status}
        is_told = bool(self.stopping or self.is_reloading)
        ledger, now = Ledger(self.settings.state_dir), round(time.time(), 3)
        ledger.append(entry | {"time": now, "told": is_told})
        if is_told:
            # Whatever vLLM made of it: that it ended so is no fault of a checkpoint.
            ledger.append({"boot": boot.log.boot, "event": "stopped", "time": now})
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
        self.log.line("server.ended", f"{end.text}; starting the next one {when}")
        self._sleep(then.delay)
        return then.number

    def _sleep(self, seconds: float) -> None:
        """Wait before a start, unless told to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._wait(left)
            self._reap()
            if told := [number for number in self._heard() if number in STOPS]:
                self._leave(128 + told[0])

    def _leave(self, status: int) -> NoReturn:
        if self.standby:
            self.standby.end()
        raise SystemExit(status)

    def _prepare_standby(self) -> None:
        """Have a standby, fresh if the one there is gone, or older than what is installed."""
        if self.standby and (why := self.standby.look()):
            self.log.line("standby.renewed", why)
            self.standby.end()
            self.standby = None
        if self.distrusted:
            if self.standby:
                self.log.line("standby.given-up", f"servers are started without: {self.distrusted}")
                self.standby.end()
            self.standby = None
        elif self.standby is None:
            try:
                engine = find(self.settings.vllm, self.first.environ)
                notes = notes_for(self.settings.state_dir, self.first.words)
                self.standby = Standby(engine.interpreter, self.first.environ, notes)
            except (ShardbootError, OSError) as error:
                self.log.line("standby.lost", f"servers are started without one: {error}")

    def _hear_standby(self, standby: Standby) -> None:
        """Hear that it is ready, or why it can be none."""
        was_ready = standby.ready
        if why := standby.hear():
            standby.end()
            self.standby = None
            if self.stopping:
                return
            if was_ready:
                self.log.line("standby.renewed", f"{why}; the next start makes another one")
                return
            self.log.line("standby.lost", f"servers are started without one: {why}")
            self.distrusted = why

    def _forget(self, descriptors: set[int]) -> None:
        """Close what is watched no longer."""
        self.others = self.others - descriptors
        for descriptor in descriptors:
            os.close(descriptor)

    def _wait(self, seconds: float, *descriptors: int) -> set[int]:
        """Wait until something happens: a signal, a word of a boot or of the standby, a death.

        Return which of the descriptors tell of something.
        """
        poll = select.poll()
        standby = self.standby
        channels = [standby.channel.fileno()] if standby else []
        for descriptor in (self.wakes, *channels, *descriptors):
            poll.register(descriptor, select.POLLIN)
        milliseconds = None if seconds == math.inf else max(0.0, seconds) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(milliseconds)}
        if standby and not ready.isdisjoint(channels):
            self._hear_standby(standby)
        return ready

    def _heard(self) -> list[int]:
        """Return the signals that came, but for those of children."""
        with suppress(BlockingIOError):
            return [number for number in os.read(self.wakes, 4096) if number != signal.SIGCHLD]
        return []

    def _reap(self) -> None:
        """Reap whatever has died, and remember how: nobody else would."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.ended[pid] = status


def notes_for(state_dir: Path, words: Sequence[str]) -> Path:
    """Return where servers note what they import, by vLLM's first word: the model, as a rule."""
    return state_dir / "imports" / digest_json(list(words[:1]))[:12]


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the descriptor that wakes the supervisor tells it all."""
