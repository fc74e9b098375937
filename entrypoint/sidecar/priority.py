"""Being last in line for the processor and the disk, and the first to go for want of memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
"""Its system call, for which neither Python nor glibc has a function (ioprio_set(2))."""

_THIS_PROCESS: Final = (1, 0)
_IDLE: Final = 3 << 13
_NICEST: Final = 19
_OOM: Final = ("/proc/self/oom_score_adj", b"1000")
"""What is started from here, a proof, say, goes before any server (proc_pid_oom_score_adj(5))."""


def stand_back() -> None:
    """Take the lowest priorities, for all threads that are started from now on.

    Not SCHED_IDLE: on a node whose processors are all busy, nobody would answer probes.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    path, score = _OOM
    with suppress(OSError), open(path, "r+b", buffering=0) as file:
        file.write(score)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        # What cannot be had is no failure: seccomp may forbid it.
        ctypes.CDLL(None).syscall(number, *_THIS_PROCESS, _IDLE)
