"""Work on a mount that may hang, in a process that is never waited for, and cleaned up after.

    this process ── keeper        waits until this process is done with it, or gone
                      └── worker  does all the work; may be killed at any time

Whichever of the three is killed, the others clean up; only all at once leave something. Where a
process hangs in the kernel nobody can end it before its mount answers: it is left behind, and
does nothing but end then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, Self

from entrypoint.insight.crew import Channel, become, die_with
from entrypoint.model.bounded import within

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REAP_SECONDS: Final = 2.0
_HUNG_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.01

Tell = Callable[[Any], None]
Claim = Callable[[], None]


class Overseer:
    """Does `work` in a process of its own; on leaving the `with` block nothing of it runs.

    `work` is given a way to tell things, which must be JSON, and one to say that from now on
    there is something to clean up. Then `clear` is called, in another process, however this
    ends; it says whether it could.
    """

    def __init__(
        self, work: Callable[[Tell, Claim], None], clear: Callable[[], bool], clear_seconds: float
    ) -> None:
        self._clear, self._clear_seconds = clear, clear_seconds
        # Both processes see it: what the worker claims counts though it be killed just then.
        self._claimed = mmap.mmap(-1, 1)
        alive, self_alive = os.pipe()
        hearing, telling = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            os.close(self_alive)
            os.close(hearing)
            become(lambda: self._keep(alive, telling, work))
        os.close(alive)
        os.close(telling)
        self._channel = Channel(hearing, self_alive)
        self.is_clear = True

    def hear(self, seconds: float) -> Any:
        """Return what the worker tells next. Raises: EOFError when it has ended; TimeoutError."""
        try:
            return self._channel.hear(seconds)
        except TimeoutError:
            # Cleaning up will hang as well, most likely.
            self._clear_seconds = min(self._clear_seconds, _HUNG_SECONDS)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        status = _reap(self._keeper, self._clear_seconds)
        self.is_clear = status == 0
        if status is not None and status < 0 and self._claimed[0]:
            # The keeper was killed itself, and with it the worker.
            self.is_clear = bool(within(self._clear_seconds, self._clear))

    def _keep(self, alive: int, telling: int, work: Callable[[Tell, Claim], None]) -> None:
        # A terminal's ^C and a unit's stop are for the process that we watch.
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _let_go_of_streams()
        keeper = os.getpid()
        worker = os.fork()
        if worker == 0:
            os.close(alive)
            self._work(keeper, telling, work)
        os.close(telling)
        with contextlib.suppress(OSError):
            # Here too: else it might not have its group yet when that is killed.
            os.setpgid(worker, worker)
        os.read(alive, 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        _reap(worker, _REAP_SECONDS)
        if self._claimed[0] and not self._clear():
            os._exit(1)

    def _work(self, keeper: int, telling: int, work: Callable[[Tell, Claim], None]) -> NoReturn:
        os.setpgid(0, 0)
        die_with(keeper)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        channel = Channel(-1, telling)
        become(lambda: work(channel.tell, self._claim), lambda trace: channel.tell({"bug": trace}))

    def _claim(self) -> None:
        self._claimed[0] = 1


def _let_go_of_streams() -> None:
    """Whoever reads this program's output must not wait for a process that hangs."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _reap(pid: int, seconds: float) -> int | None:
    """Wait for a child's end, and return its status; None where it does not end in time."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
