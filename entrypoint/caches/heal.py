"""Caches that a crash has left: one that is bad never blocks a boot.

Measured with vLLM 0.32 (docs/measured.md): it compiles anew what it finds empty or torn. So most of
this is for what its other versions, and other compilers, make of such files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from entrypoint.caches.place import MODE
from entrypoint.store import lock, publish, sweep, tree

MOST_ENTRIES: Final = 20_000
"""So many are looked at: a boot must not wait for more."""

EMPTY_BY_RIGHT: Final = ".lock"
"""The suffix of torch's lock files."""


def renew(place: Path) -> bool:
    """Move the caches away, unless a server holds them, or there are none; say if it was done."""
    with sole(place) as obstacle:
        if obstacle is not None:
            return False
        try:
            take_away(place)
        except OSError:
            return False
    sweep.empty_trash(place.parent)
    return True


def take_away(place: Path) -> None:
    """Move caches into the trash beside them. Raises: OSError."""
    unique = f"{place.name[:200]}.{os.urandom(4).hex()}"
    publish.discard(place.parent, place, unique, MODE)


@contextlib.contextmanager
def sole(place: Path) -> Iterator[OSError | None]:
    """Hold the exclusive lock on caches; yield why not, where it is not to be had."""
    try:
        descriptor = os.open(place, tree.DIRECTORY)
    except OSError as error:
        yield error
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error
        else:
            yield None
    finally:
        lock.give_back(descriptor)


def heal(place: Path) -> int:
    """Remove every file that is empty or cannot be read, of so many; return how many went."""
    removed = 0
    with contextlib.suppress(OSError):
        for seen, (path, status) in enumerate(tree.files_beneath(place)):
            if seen >= MOST_ENTRIES:
                break
            if _is_bad(place / path, status):
                (place / path).unlink()
                removed += 1
    return removed


def _is_bad(path: Path, status: os.stat_result) -> bool:
    if not stat.S_ISREG(status.st_mode):
        return False
    if status.st_size == 0:
        return path.suffix != EMPTY_BY_RIGHT
    try:
        with path.open("rb") as file:
            return not file.read(1)
    except OSError:
        return True
