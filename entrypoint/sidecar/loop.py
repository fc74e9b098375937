"""One loop over named jobs, each at its own interval, one piece of work at a time.

So nothing here ever competes with itself for the disk, and no job needs a lock against another.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

from entrypoint.errors import ShardbootError

MOST_DOUBLINGS: Final = 10

HINT_SECONDS: Final = 1.0
"""How long after a hint the next one counts: however many there are, it is one look a second."""

LONGEST_SLEEP: Final = 3600.0

Work = Callable[[], Iterable[float]]
"""One run of a job. It yields between its pieces: for how many seconds it wants to rest."""


class Record(NamedTuple):
    """What became of a job so far; read by other threads, so it is replaced as a whole.

    `failures` are all, `in_row` those since it last went well, which was at `succeeded`. `began` is
    the start of the run under way. Times are seconds since 1970, 0 for never and for none.
    """

    runs: int = 0
    failures: int = 0
    in_row: int = 0
    succeeded: float = 0.0
    began: float = 0.0
    error: str = ""


class Job:
    """Something that is done again and again, `interval` seconds after it was last done.

    One that `is_hinted` is done sooner where somebody says that it is worth it. Any can be asked
    for; `when_asked` is called, in the loop's thread, before it is done for that.
    """

    def __init__(
        self,
        name: str,
        interval: float,
        work: Work,
        *,
        is_hinted: bool = False,
        when_asked: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.interval, self.is_hinted = name, interval, is_hinted
        self.record = Record()
        self.is_asked_for = False
        self._work, self._when_asked = work, when_asked
        self._pieces: Iterator[float] | None = None

    @property
    def heeds_hints(self) -> bool:
        """Whether a hint has it done now; what failed rests as long as it was to."""
        return self.is_hinted and not self.record.in_row

    def ask(self) -> bool:
        """Have it done next, whatever it rests for; False where that was asked for, or goes on.

        Another thread may call this; the loop's hint is to be set after it.
        """
        if self.is_asked_for or self.record.began:
            return False
        self.is_asked_for = True
        return True

    def turn(self, say: Callable[[str], None]) -> float:
        """Do one piece of work; return in how many seconds the next one is due.

        A failure is one line for `say`, and ends the run.
        """
        before = self.record
        try:
            if self.is_asked_for:
                self.is_asked_for = False
                self._when_asked()
            if self._pieces is None:
                self.record = before._replace(runs=before.runs + 1, began=time.time())
                self._pieces = iter(self._work())
            return next(self._pieces)
        except StopIteration:
            self.record = self.record._replace(in_row=0, succeeded=time.time(), began=0.0, error="")
            wait = self.interval
        except (ShardbootError, OSError) as error:
            in_row = before.in_row + 1
            self.record = self.record._replace(
                failures=before.failures + 1, in_row=in_row, began=0.0, error=str(error)
            )
            wait = rest_after(self.interval, in_row, random.random())  # noqa: S311 - no secret
            reason = f"{error.reason}: " if isinstance(error, ShardbootError) else ""
            say(f"{self.name}: {reason}{error}; the next try is in {wait:.0f} s")
        self._pieces = None
        return wait


def rest_after(interval: float, failures: int, chance: float) -> float:
    """Return how long a job rests after so many failures in a row: up to 17 minutes longer.

    Less up to half of that, by `chance` from 0 to 1: many hosts that failed at once, as when their
    store went away, are not to come back at once.
    """
    return interval + 2.0 ** min(failures, MOST_DOUBLINGS) * (1.0 - chance / 2)


def next_due(due: Mapping[str, float]) -> str:
    """Return whose turn it is; of several that were due at once, the first one named."""
    return min(due, key=lambda name: due[name])


def run(jobs: Sequence[Job], say: Callable[[str], None], hint: threading.Event) -> NoReturn:
    """Do all jobs for ever, the first time in their order; only a signal ends this.

    `hint`, which another thread sets, makes those due that heed it, or were asked for.
    """
    by_name = {job.name: job for job in jobs}
    due = dict.fromkeys(by_name, time.monotonic())
    heard = 0.0
    while True:
        name = next_due(due)
        hint.wait(min(max(0.0, due[name] - time.monotonic()), LONGEST_SLEEP))
        if hint.is_set():
            hint.clear()
            now = time.monotonic()
            heard = max(now, min(heard, now) + HINT_SECONDS)
            due |= {job.name: min(due[job.name], heard) for job in jobs if job.heeds_hints}
            due |= {job.name: now for job in jobs if job.is_asked_for}
            name = next_due(due)
        if due[name] > time.monotonic():
            continue
        rest = by_name[name].turn(say)
        due[name] = time.monotonic() + rest
        _reap()


def _reap() -> None:
    """Reap who looked at a mount that did not answer then, and has ended since."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
