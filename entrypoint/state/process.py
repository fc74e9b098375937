"""Processes: whether one that was noted earlier still runs, and what becomes of orphans.

A pid alone is reused; with when it started it is a name.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from entrypoint.checkpoint.digest import Json

_MAX_PID: Final = 1 << 22
"""The kernel's own bound (proc(5)); what a file says may be anything."""

_MAX_DESCENT: Final = 4
_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36


def host_boot() -> str:
    """Return the kernel's name for this boot of the host: what ran before it runs no more."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """Return the kernel's name for the pid namespace that we are in; "" where that is hidden."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the host booted; None if none runs."""
    with suppress(OSError):
        look = _look(pid)
        return None if look is None or look[0] in (b"Z", b"X") else look[1]
    return None


def starts() -> list[float]:
    """Return when this process, and a few of those above it, started: seconds since 1970.

    The one furthest up comes first.
    """
    pid, found = os.getpid(), list[float]()
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    with suppress(OSError):
        while pid and len(found) < _MAX_DESCENT and (look := _look(pid)) is not None:
            found.insert(0, began + look[1] / os.sysconf("SC_CLK_TCK"))
            pid = look[2]
    return found


def is_alive(pid: Json, start: Json) -> bool:
    """Tell whether just this process still runs; True where that is hidden from us.

    Or where nobody can tell, as without a descriptor to look with. In another pid namespace than
    the one that noted it, a process is not found.
    """
    if not isinstance(pid, int) or not isinstance(start, int) or not 0 < pid <= _MAX_PID:
        return False
    try:
        if _look(pid) is not None:
            return started(pid) == start
    except OSError:
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:
        # It is there, and /proc is mounted with hidepid.
        return True
    except OSError:
        return False
    return False


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal once its parent is gone; exec keeps that."""
    _prctl(_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent is gone, as pid 1 is."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """prctl(2); what a kernel does not know changes nothing."""
    import ctypes  # noqa: PLC0415 - milliseconds, and few processes need it

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _look(pid: int) -> tuple[bytes, int, int] | None:
    """Return state, start and parent of a process, waiting to be reaped or not; None if none is.

    Raises: OSError where nobody can tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold anything, blanks and brackets too; its last bracket ends it.
    fields = stat.rpartition(b")")[2].split()
    return fields[0], int(fields[19]), int(fields[1])
