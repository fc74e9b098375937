"""The processes of a server: all of its group, and what they would leave behind in memory."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
SHM: Final = re.compile(r"/dev/shm/(psm_|vllm_dist_)[^/]*")  # noqa: S108 - nothing is made there
"""How Python and vLLM name segments that they share; what else lies there is somebody's files."""

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent is gone, as pid 1 is (prctl(2))."""
    import ctypes  # noqa: PLC0415 - only under a supervisor

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have this process told to stop when its parent is gone; exec keeps that (prctl(2))."""
    import ctypes  # noqa: PLC0415 - as above

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def members(group: int) -> list[int]:
    """Return the pids of a process group that still run (proc(5))."""
    found = []
    for name in os.listdir(PROC):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
                # A zombie whose threads still run has let go of nothing yet.
                is_over = fields[0] in (b"Z", b"X") and len(os.listdir(PROC / name / "task")) < 2  # noqa: PLR2004
                if int(fields[2]) == group and not is_over:
                    found.append(int(name))
    return found


def kill(group: int) -> None:
    """Send SIGKILL to all of a process group."""
    for pid in members(group):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch(pids: list[int]) -> set[int]:
    """Return a descriptor for each that becomes readable when that process ends (pidfd_open(2))."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            found.add(os.pidfd_open(pid))
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Return the files of /dev/shm that these processes have mapped, by their paths (proc(5))."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if SHM.fullmatch(fields[-1]):
                    found.add(fields[-1])
    return found


def forget(paths: set[str]) -> None:
    """Remove what a killed server left in /dev/shm; what is another user's stays."""
    for path in sorted(paths):
        with suppress(OSError):
            if os.stat(path, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(path)
