"""The steps of an upgrade, and the way back. What was done already is found so, and left so.

Nothing is remembered between runs: whether an instance runs, the host tells, and where requests go,
the traffic. So an upgrade that was killed is gone on with by the next run, whatever it was at.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from typing import Final

from rolling.command import Command, StepError, run
from rolling.hosts import Host
from rolling.server import is_taken
from rolling.traffic import Traffic
from rolling.wishes import Instance, Wishes

CHECKPOINT_SECONDS: Final = 3 * 3600.0
"""A save with its proof may take an hour, after a wait of as long for another's."""

POLL_SECONDS: Final = 0.2
MOST_MISSES: Final = 3
"""Looks in a row at which the new instance may be unwell before traffic goes back."""


class Upgrade:
    """From one instance to the other, step by step; `at` says at which."""

    def __init__(
        self,
        host: Host,
        traffic: Traffic,
        old: Instance,
        new: Instance,
        wishes: Wishes,
        tell: Callable[[str], None],
    ) -> None:
        self.host, self.traffic, self.wishes = host, traffic, wishes
        self.old, self.new = old, new
        self.at = "look"
        self.is_over = False
        self._model = ""
        self._tell = tell

    def look(self) -> None:
        """Find out whether it can begin; touches nothing. Raises: StepError."""
        self.at = "look"
        where = self.traffic.where()
        if where not in {self.old.address, self.new.address}:
            both = f"{self.old.address} or {self.new.address}"
            raise StepError(f"requests go to {where}, and to neither {both}: wrong words?")
        self.traffic.check()
        for one in (self.old, self.new):
            if not self.host.is_up(one.name) and is_taken(one.address):
                raise StepError(f"{one.name} does not run, but somebody listens at {one.address}")
        way_back = "" if self.old.server.is_healthy() else "; it does not answer: no way back"
        self._say(f"requests go to {where}, {self.old.name} is at {self.old.address}{way_back}")

    def forward(self) -> None:
        """Take all steps. Raises: StepError: at one of them, see `at` and `back`."""
        self.at = "1/4 checkpoint"
        if self._end_errand():
            self._say("what an upgrade that was killed had begun was stopped")
        self._make_checkpoint()
        self.at = "2/4 start"
        self._start()
        self.at = "3/4 check"
        self._check()
        self.at = "4/4 move"
        self._move()
        self.at = "4/4 drain"
        self._drain(self.old, beside=self.new)
        self.at = "4/4 stop"
        # From here on there is nothing to go back to.
        self.is_over = True
        run(self.host.stopping(self.old.name))
        if self.host.is_enabled(self.old.name):
            self.host.enable(self.old.name, yes=False)
        self._say(f"{self.old.name} has stopped")

    def back(self) -> str:
        """Make all as it was before, and say what that took. Raises: StepError: it cannot be."""
        if has_moved := self.traffic.where() != self.old.address:
            if not self.old.server.is_healthy():
                left = f"requests go to {self.new.name}, which runs on"
                raise StepError(f"{self.old.name} does not answer; {left}")
            self.traffic.move(self.old.address)
            self.at = "back"
            self._drain(self.new)
        self._end_errand()
        was_up = self.host.is_up(self.new.name)
        run(self.host.stopping(self.new.name))
        if self.host.is_enabled(self.new.name) and self.host.is_enabled(self.old.name):
            self.host.enable(self.new.name, yes=False)
        said = f"requests go to {self.old.name} {'again' if has_moved else 'as before'}"
        return f"{said}, {self.new.name} {'was stopped' if was_up else 'does not run'}"

    def preview(self) -> None:
        """Say what `forward` would do from here; touches nothing. Raises: StepError."""
        old, new = self.old, self.new
        self.at = "1/4 checkpoint"
        if self.host.is_up(new.name):
            self._say(f"{new.name} runs already: nothing to do")
        elif self.wishes.checkpoint == "any":
            self._say("whatever the new instance finds")
        elif self.host.is_at_it(new.name):
            self._say(f"would run: {self.host.ending(new.name).spelled}, left by a killed upgrade")
        else:
            action, text = self._plan()
            if action != "reuse" and self.wishes.checkpoint == "make":
                text = f"{text}; would run: {self._making(action).spelled}"
            self._say(text)
        self.at = "2/4 start"
        if not self.host.is_up(new.name):
            self._say(f"would run: {self.host.starting(new.name).spelled}")
        self._say(f"would wait until {new.server.url}/health answers")
        self.at = "3/4 check"
        self._say(f"would ask {new.server.url} for its names, and for a completion")
        self.at = "4/4 move"
        self._say(f"would send requests to {new.address}")
        self.at = "4/4 drain"
        self._say(f"would wait until {old.name} has no requests, {self.wishes.drain_timeout:g} s")
        self.at = "4/4 stop"
        self._say(f"would run: {self.host.stopping(old.name).spelled}")

    def _make_checkpoint(self) -> None:
        if self.wishes.checkpoint == "any" or self.host.is_up(self.new.name):
            self._say(f"{self.new.name} may start from what it finds")
            return
        action, text = self._plan()
        if action != "reuse" and self.wishes.checkpoint == "make":
            self._say(f"{text}; now: shardboot {_verb(action)}")
            run(self._making(action), seconds=CHECKPOINT_SECONDS)
            action, text = self._plan()
        if action != "reuse":
            raise StepError(f"{self.new.name} would not start from a checkpoint: {text}")
        self._say(text)

    def _end_errand(self) -> bool:
        """Stop what is at a checkpoint for the new instance; tell whether anything was."""
        if not self.host.is_at_it(self.new.name):
            return False
        try:
            run(self.host.ending(self.new.name))
        except StepError:
            # Perhaps it has just ended by itself.
            if self.host.is_at_it(self.new.name):
                raise
        return True

    def _plan(self) -> tuple[str, str]:
        """Return what the new instance would do, as a word, and as a sentence."""
        planning = self.host.command(self.new.name, "plan", "--format", "json")
        told = run(planning, seconds=CHECKPOINT_SECONDS)
        try:
            found = json.loads(told)
            return str(found["action"]), f"{found['reason']}: {found['text']}"
        except (ValueError, TypeError, KeyError):
            raise StepError("shardboot plan did not say what it would do") from None

    def _making(self, action: str) -> Command:
        return self.host.command(self.new.name, _verb(action))

    def _start(self) -> None:
        new = self.new
        if not self.host.is_up(new.name):
            run(self.host.starting(new.name))
            self._say(f"{new.name} is started")
        began = time.monotonic()
        while not new.server.is_healthy():
            if trouble := self.host.trouble(new.name):
                raise StepError(f"{new.name} {trouble}")
            if time.monotonic() - began > self.wishes.start_timeout:
                seconds = f"{self.wishes.start_timeout:g} s"
                raise StepError(f"{new.server.url}/health: not well within {seconds}")
            time.sleep(POLL_SECONDS)
        if not self.host.is_up(new.name):
            raise StepError(f"{new.name} {self.host.trouble(new.name)}; somebody else answers")
        self._say(f"{new.name} is healthy after {time.monotonic() - began:.1f} s")

    def _check(self) -> None:
        server, names = self.new.server, self.new.server.names()
        wanted = [self.wishes.model] if self.wishes.model else names
        if not self.wishes.model and self.old.server.is_healthy():
            # Who asks for a name today shall find it tomorrow.
            wanted = self.old.server.names()
        missing = [name for name in wanted if name not in names]
        if missing or not wanted:
            raise StepError(f"{server.url} does not serve {missing or 'any model'}, but {names}")
        self._model = wanted[0]
        if self.wishes.check:
            told = {"URL": server.url, "MODEL": self._model}
            run(self.wishes.check, environ=told)
            self._say(f"{shlex.join(self.wishes.check)}: all is well")
        else:
            self._say(f"{self._model} answers: {server.complete(self._model)!r}")

    def _move(self) -> None:
        # Enabled before: after a power loss in between both would start, and none be missing.
        if self.host.is_enabled(self.old.name) and not self.host.is_enabled(self.new.name):
            self.host.enable(self.new.name, yes=True)
        self.traffic.move(self.new.address)
        if self.wishes.front and not self.wishes.check:
            self.wishes.front.complete(self._model)
        self._say(f"requests go to {self.new.name} at {self.new.address}")

    def _drain(self, one: Instance, beside: Instance | None = None) -> None:
        """Wait until an instance has nothing left to do, while the other one, if given, is well.

        Whatever it has to do still when the time is over ends with it. Raises: StepError.
        """
        deadline = time.monotonic() + self.wishes.drain_timeout
        busy_at, misses = time.monotonic(), 0
        while self.host.is_up(one.name):
            load, now = one.server.load(), time.monotonic()
            if load != 0 or not self.traffic.is_settled():
                busy_at = now
            if now - busy_at >= self.wishes.quiet:
                self._say(f"{one.name} has no requests any more")
                return
            if now > deadline:
                left = "unknown" if load is None else f"{load:g}"
                self._say(f"time is over; {one.name} stops with requests left: {left}")
                return
            misses = 0 if beside is None or beside.server.is_healthy() else misses + 1
            if beside is not None and misses >= MOST_MISSES:
                raise StepError(f"{beside.server.url}/health: not well any more")
            time.sleep(POLL_SECONDS)
        self._say(f"{one.name} does not run")

    def _say(self, text: str) -> None:
        self._tell(f"{self.at}: {text}")


def _verb(action: str) -> str:
    """Return the command that makes what is missing, by what a plan says."""
    return "pull" if action == "copy" else "save"
