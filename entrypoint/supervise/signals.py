"""The signals that a supervisor hears, by a descriptor: one poll waits for them and all else."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Final

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
HEARD: Final = (signal.SIGHUP, *STOPS)


class Signals:
    """Hears them from the start; `wakes` is readable when one has come, or a child has ended."""

    def __init__(self) -> None:
        # What a parent ignores stays ignored, as nohup wants it.
        heard = [number for number in HEARD if signal.getsignal(number) != signal.SIG_IGN]
        self.numbers = [signal.SIGCHLD, *heard]
        self.wakes, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {n: signal.signal(n, _wake) for n in self.numbers}
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def heard(self) -> list[int]:
        """Return the signals that came, but for those of children; what stops comes first."""
        with suppress(BlockingIOError):
            numbers = [number for number in os.read(self.wakes, 4096) if number != signal.SIGCHLD]
            return sorted(numbers, key=lambda number: number not in STOPS)
        return []

    def fork(self) -> int:
        """As os.fork, but that in the fork signals do what they did before. Raises: OSError."""
        # Until its handlers are its own, the fork would write into the supervisor's pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        pid = -1
        try:
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for number, handler in self._before.items():
                    signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
        return pid

    def fork_with_pipe(self) -> tuple[int, int]:
        """As `fork`; return its end of a pipe from there to here as well. Raises: OSError."""
        hears, tells = os.pipe2(os.O_CLOEXEC)
        pid = -1
        try:
            pid = self.fork()
        finally:
            if pid:
                os.close(tells)
            if pid <= 0:
                os.close(hears)
        return pid, hears if pid else tells


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the descriptor tells it all."""
