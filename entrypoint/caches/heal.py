"""Caches that a crash has left: one that is bad never blocks a boot.

Measured with vLLM 0.32 (docs/measured.md): it compiles anew what it finds empty or torn. So most of
this is for what its other versions, and other compilers, make of such files.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from entrypoint.caches.place import MODE, require_own
from entrypoint.store import lock, trash, tree

MOST_ENTRIES: Final = 20_000
"""So many are looked at: a boot must not wait for more."""

EMPTY_BY_RIGHT: Final = ".lock"
"""The suffix of torch's lock files."""


def renew(place: Path) -> bool:
    """Move the caches away, unless a server holds them, or there are none; say if it was done.

    Those of another user stay.
    """
    try:
        with _ours(place):
            take_away(place)
    except OSError:
        return False
    trash.empty(place.parent)
    return True


def take_away(place: Path) -> None:
    """Move caches into the trash beside them. Raises: OSError."""
    unique = f"{place.name[:200]}.{os.urandom(4).hex()}"
    trash.discard(place.parent, place, unique, MODE)


@contextlib.contextmanager
def sole(place: Path) -> Iterator[OSError | None]:
    """Hold the exclusive lock on caches; yield why not, where it is not to be had."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_held(place))
        except OSError as error:
            yield error
        else:
            yield None


@contextlib.contextmanager
def _held(place: Path) -> Iterator[int]:
    """Yield the descriptor of caches with the exclusive lock on them. Raises: OSError."""
    descriptor = os.open(place, tree.DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        lock.give_back(descriptor)


@contextlib.contextmanager
def _ours(place: Path) -> Iterator[int]:
    """As `_held`, of caches that are this user's alone. Raises: OSError."""
    with _held(place) as descriptor:
        require_own(descriptor)
        yield descriptor


def heal(place: Path) -> int:
    """Remove every file that is empty or cannot be read, of so many; return how many went.

    None, where a server holds them, which may just be writing it, or where they are another user's.
    """
    removed = 0
    with contextlib.suppress(OSError), _ours(place) as root:
        for directory, name in itertools.islice(_files(root), MOST_ENTRIES):
            if _is_bad(directory, name):
                os.unlink(name, dir_fd=directory)
                removed += 1
    return removed


def _files(root: int) -> Iterator[tuple[int, str]]:
    """Yield what is no directory below an open one: the open directory that it is in, its name."""
    for _, _, names, directory in os.fwalk(dir_fd=root):
        for name in names:
            yield directory, name


def _is_bad(directory: int, name: str) -> bool:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return False
    if status.st_size == 0:
        return not name.endswith(EMPTY_BY_RIGHT)
    try:
        with os.fdopen(tree.open_regular(directory, name), "rb") as file:
            return not file.read(1)
    except OSError:
        return True
