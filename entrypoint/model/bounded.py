"""Looking at foreign file systems without waiting for them: in a child, and not for ever."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NoReturn

from entrypoint.checkpoint.digest import Json

STDERR: Final = 2

HUNG_SECONDS: Final = 30.0
"""Whoever is silent for so long hangs: a cold network takes seconds for an answer, not more."""

_SIGN_SECONDS: Final = 0.05
_END_SECONDS: Final = 1.0
"""For a child that has answered to end: one of its threads the kernel may hold as well."""

_END: Final = b"\n"
"""Behind an answer that is whole; JSON has none in it."""

NAME: Final = b"shardboot-look"
"""What the list of processes shows of who looks; the kernel keeps 15 characters."""

MOST_LEFT: Final = 8
"""So many looks that hang at one place tell that it does; more would only be more processes."""

Alive = Callable[[], None]

_left: Final[defaultdict[str, list[int]]] = defaultdict(list)
"""Descriptors of the children that were left behind, by the place that they look at (pidfd)."""


def within(seconds: float, look: Callable[[], Json], at: str = "") -> Json:
    """Return what `look` returns in a forked child, or None when it takes longer, or dies.

    Else as `while_alive`.
    """
    try:
        return while_alive(seconds, lambda _: look(), at)
    except ChildProcessError:
        return None


def while_alive(silence: float, look: Callable[[Alive], Json], at: str = "") -> Json:
    """Return what `look` returns in a forked child, or None when it falls silent.

    It may take as long as it likes while no two calls of what it is given lie `silence` seconds
    apart: many files are no hung mount. A child that hangs in the kernel is left behind: nobody
    can end or reap it before its mount answers. It keeps nothing of ours open, and is called as
    `NAME` says. Who looks again and again says `at` which place: where `MOST_LEFT` such children
    still hang there, the answer is None at once. `look` must not return None, nor need a
    descriptor.
    Raises: OSError where no process is to be had; ChildProcessError when it dies.
    """
    if at and _count_left(at) >= MOST_LEFT:
        return None
    reader, writer = os.pipe()
    try:
        pid = _fork()
    except OSError:
        # No process is to be had; what asks again and again must not run out of descriptors, too.
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        _report(writer, look)
    os.close(writer)
    try:
        answer = _gather(reader, silence)
    finally:
        os.close(reader)
    if answer is None or not _ends(pid):
        if at:
            with contextlib.suppress(OSError):
                _left[at].append(os.pidfd_open(pid))
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, os.WNOHANG)
    if answer is None:
        return None
    if not answer.endswith(_END):
        how = " as it told what it saw" if answer else ""
        msg = f"a child that looked at a file system died{how}"
        raise ChildProcessError(msg)
    value: Json = json.loads(answer)
    return value


def _ends(pid: int) -> bool:
    """Wait until a child has ended, but not for ever; False where it is held."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        # None is to be had; who has answered ends, as a rule.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return True
    try:
        return bool(select.select([descriptor], [], [], _END_SECONDS)[0])
    finally:
        os.close(descriptor)


def _count_left(at: str) -> int:
    """Return how many children still hang at a place."""
    ended = select.select(_left[at], [], [], 0)[0]
    for descriptor in ended:
        _left[at].remove(descriptor)
        os.close(descriptor)
    return len(_left[at])


def _fork() -> int:
    """Fork, and have no signal handled meanwhile.

    What modules had registered for a fork, as `logging` has, is called within it, and what a
    handler raises there is dropped: a signal that was to end us would be lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _report(writer: int, look: Callable[[Alive], Json]) -> NoReturn:
    """In the child: send what was found and end, without anything of the parent's exit."""
    try:
        _close_all_but(writer)
        # These are closed by now, and their numbers may soon be those of other files.
        _left.clear()
        _take_name()
        data = json.dumps(look(_Signs(writer))).encode()
        _write(writer, data + _END)
    finally:
        os._exit(0)


def _take_name() -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/comm", os.O_WRONLY)
        os.write(descriptor, NAME)
        os.close(descriptor)


class _Signs:
    """Signs of life, on the way that the answer takes; none of a look that is over at once."""

    def __init__(self, writer: int) -> None:
        self._writer, self._last = writer, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > _SIGN_SECONDS:
            # A blank before a JSON document means nothing in it.
            _write(self._writer, b" ")
            self._last = time.monotonic()


def _write(writer: int, data: bytes) -> None:
    while data:
        data = data[os.write(writer, data) :]


def _close_all_but(writer: int) -> None:
    # A lock that the child shares is held until both have closed it, and a child may hang for ever.
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > STDERR and descriptor != writer:
            # Of one: unlike `os.close` it takes what is closed already, as the listing's own.
            os.closerange(descriptor, descriptor + 1)


def _gather(descriptor: int, silence: float) -> bytes | None:
    """Return the answer, with `_END` where it is whole; None where nothing came for too long.

    It is not waited for the pipe's end: a thread that the kernel holds keeps that open.
    """
    answer = b""
    while select.select([descriptor], [], [], silence)[0]:
        piece = os.read(descriptor, 1 << 20)
        answer += piece
        if not piece or answer.endswith(_END):
            return answer.lstrip(b" ")
    return None
