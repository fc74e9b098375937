"""What killed builders have left: found, and deleted.

Staging that is swept goes into the trash in one step first: were it emptied in place, a builder
that its lock does not show could still commit half of it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.errors import StagingError
from entrypoint.state import process
from entrypoint.store import lock, order, trash, tree
from entrypoint.store.staging import NOTE, NOTE_BYTES, STAGING, host
from entrypoint.store.tree import DIR_MODE


def sweep(root: Path, grace_seconds: float, dir_mode: int = DIR_MODE, spare: str = "") -> list[str]:
    """Delete staging that nobody builds in any more, and the trash; return the names removed.

    A copy of `spare` is about to be gone on with, and stays. What cannot be deleted now is left in
    the trash for the next sweep.
    """
    left = abandoned(root, grace_seconds)
    discard(root, [path for path in left if not spare or part_of(path) != spare], dir_mode)
    return trash.empty(root)


def discard(root: Path, staged: Iterable[Path], dir_mode: int) -> dict[Path, OSError]:
    """Move staging into the trash; return what cannot be moved and stays where it is, and why."""
    stayed: dict[Path, OSError] = {}
    for path in staged:
        try:
            trash.discard(root, path, path.name, dir_mode)
        except FileNotFoundError:
            # Another sweep was faster.
            continue
        except OSError as error:
            stayed[path] = error
    return stayed


def part_of(staged: Path) -> str:
    """Return what a copy's staging says it is a copy of; "" where it says nothing."""
    try:
        return read_bounded(staged / NOTE, NOTE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def teed(root: Path, subject: str) -> tuple[list[Path], list[Path]]:
    """Return the staging of tees of `subject`: what a server still builds in, and what none does.

    Without locks none is seen to live; where one does all the same, its tee comes to nothing.
    """
    found = [path for path in tree.entries(root / STAGING) if _is_tee_of(subject, path)]
    left = [path for path in found if _is_free(path, without_locks=True)]
    # What went meanwhile is neither.
    return [path for path in found if path not in left and path.is_dir()], left


def _is_tee_of(subject: str, staged: Path) -> bool:
    try:
        return bool(order.read(staged).get("subject") == subject)
    except StagingError:
        return False


def abandoned(root: Path, grace_seconds: float) -> list[Path]:
    """Return staging that nobody builds in any more.

    Its flock is free *and* nothing in it is younger than the grace: where locks lie, or there are
    none, the grace alone must do.
    """
    return [
        path
        for path in tree.entries(root / STAGING)
        if _is_free(path, without_locks=True) and _age(path) > grace_seconds
    ]


def orphaned(root: Path) -> list[Path]:
    """Return staging that a builder of this host who died has left, however young.

    Its flock is free *and* its pid is nobody's; or is ours, who builds nothing yet: a container's
    first process is 1 each time.
    """
    return [
        path
        for path in tree.entries(root / STAGING)
        if builder_is_dead(path.name) and _is_free(path, without_locks=False)
    ]


def _is_free(path: Path, *, without_locks: bool) -> bool:
    try:
        descriptor = os.open(path, tree.DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return without_locks and error.errno in lock.NO_LOCKS
    finally:
        lock.give_back(descriptor)
    return True


def builder_is_dead(name: str) -> bool:
    """Tell from a staging's name that its builder is of this host and gone, or is this process."""
    _, _, end = name.partition(f".{host()}.")
    pid = end.partition(".")[0]
    if not pid.isdecimal():
        # Another host's, or none of ours.
        return False
    return int(pid) == os.getpid() or process.started(int(pid)) is None


def _age(path: Path) -> float:
    """Return the seconds since anything in `path` was changed; 0 when that cannot be told."""
    try:
        newest = max((status.st_mtime for _, status in tree.files_beneath(path)), default=0.0)
        return time.time() - max(newest, path.stat().st_mtime)
    except OSError:
        return 0.0
