"""The processes of a server: all that descend from the supervisor, and what they share in memory.

A process group would not do: children leave it. But whoever loses its parent is adopted by the
supervisor, so that nothing that a server has started is lost from sight.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from entrypoint.model import bounded
from entrypoint.state import process

PROC: Final = Path("/proc")
SHM: Final = Path("/dev/shm")  # noqa: S108 - nothing is made there
SEGMENT: Final = re.compile(rf"{SHM}/(psm_[^/]*|vllm_dist_[^/]*|\d+-[^/]*-cpushm_\d+)")
"""How Python and vLLM name segments that they share, an older one by its port; what else lies there
is somebody's files."""

GROUP: Final = re.compile(rf"{SHM}/vllm_dist_[0-9a-f]+-")
"""What the segments of one server's group of workers have in common (`VLLM_DIST_IDENT`)."""

MAX_PID_BYTES: Final = 32
"""Of a pid as it is told on a pipe: decimal digits, and a line's end."""

ENGINE: Final = b"VLLM::"

TRACKER: Final = b"multiprocessing.resource_tracker"
"""Python's own, which removes segments when all who knew of them are gone, and then ends."""


def of(parent: int, but: Collection[int] = ()) -> list[int]:
    """Return the pids of all that descend from a process and still run (proc(5)).

    Neither those of `but` nor what descends from them. Raises: OSError where nobody can tell.
    """
    children: dict[int, list[int]] = {}
    over: set[int] = set()
    for name in os.listdir(PROC):
        if name.isdigit():
            # It may end between two looks.
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = (PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
                # A zombie whose threads still run has let go of nothing yet.
                if fields[0] in (b"Z", b"X") and len(os.listdir(PROC / name / "task")) < 2:  # noqa: PLR2004
                    over.add(int(name))
    found, parents = list[int](), [parent]
    while parents:
        born = [child for child in children.get(parents.pop(), ()) if child not in but]
        parents += born
        found += [child for child in born if child not in over]
    return sorted(found)


def named(pids: Iterable[int]) -> dict[int, int | None]:
    """Return when each of these started: its number alone may be another's once it is gone."""
    return {pid: process.started(pid) for pid in pids}


def living(known: Mapping[int, int | None]) -> dict[int, int | None]:
    """Return those of them that still run."""
    return {pid: start for pid, start in known.items() if process.is_alive(pid, start)}


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each; who is gone, or is another user's, is passed over."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_foreign(pid: int) -> bool:
    """Tell whether a process is another user's, whom we may not end: none of a server's is.

    So is what root left running that came into the container by itself (`docker exec -u 0`).
    """
    try:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
    except PermissionError:
        return True
    return False


def is_tracker(pid: int) -> bool:
    """Tell whether a process is Python's that clears up after others."""
    with suppress(OSError):
        return TRACKER in (PROC / str(pid) / "cmdline").read_bytes()
    return False


def is_engine(pid: int) -> bool:
    """Tell whether a process is one of vLLM's engines or workers, none of which it can do without.

    They call themselves so (`set_process_title` in vllm/utils/system_utils.py). Whoever is called
    as its parent is no engine, or not yet: a fork that runs a compiler, or only looks at itself.
    """
    with suppress(OSError):
        title = (PROC / str(pid) / "cmdline").read_bytes()
        if title.startswith(ENGINE):
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return title != (PROC / os.fsdecode(fields[1]) / "cmdline").read_bytes()
    return False


def is_look(pid: int) -> bool:
    """Tell whether a process only looks at a file system, and so holds nothing of a server's.

    Where that does not answer, not even SIGKILL ends it.
    """
    with suppress(OSError):
        return (PROC / str(pid) / "comm").read_bytes().strip() == bounded.NAME
    return False


def watch(pids: Iterable[int]) -> dict[int, int]:
    """Return descriptors that become readable when a process ends (pidfd_open(2)), and its pid."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[os.pidfd_open(pid)] = pid
    return found


def segments() -> frozenset[str]:
    """Return the files of /dev/shm, whosesoever they are."""
    with suppress(OSError):
        return frozenset(os.listdir(SHM))
    return frozenset()


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files of /dev/shm that these processes have mapped, by their paths (proc(5))."""
    found: set[str] = set()
    for pid in pids:
        # Line by line: they are megabytes, and what a supervisor once took it keeps.
        with suppress(OSError), (PROC / str(pid) / "maps").open(errors="replace") as lines:
            for line in lines:
                path = line.rstrip("\n").split(maxsplit=5)[-1]
                if SEGMENT.fullmatch(path):
                    found.add(path)
    return found


def forget(paths: set[str]) -> None:
    """Remove what a killed server left in /dev/shm; what is another user's stays.

    With each of a group go the others: who made one may have died before anybody saw it.
    """
    groups = tuple(found[0] for path in paths if (found := GROUP.match(path)))
    others = {str(SHM / name) for name in segments()}
    for path in sorted(paths | {other for other in others if groups and other.startswith(groups)}):
        with suppress(OSError):
            if os.stat(path, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(path)
