"""The first half of a commit: staging holds just what it must, and all of that is durable."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.errors import StagingError
from entrypoint.store import tree


def drop_notes(staged: Path, but: str = "") -> None:
    """Remove what the builders left for each other: hidden files at the top. Raises: OSError."""
    for entry in list(staged.iterdir()):
        if entry.name == but:
            continue
        if entry.name.startswith(".") and (entry.is_symlink() or not entry.is_dir()):
            entry.unlink()


def check(staged: Path, entries: Iterable[FileEntry], but: str = "") -> None:
    """Refuse unless `staged` holds just the listed files, each regular and of its size.

    `but` is the name of one that may be there beside them.

    Raises: StagingError naming the first that is not so; OSError.
    """
    expected = {entry.path: entry.size for entry in entries}
    for path, status in tree.files_beneath(staged):
        if path == but:
            continue
        size = expected.pop(path, None)
        if size is None:
            raise StagingError(f"{staged / path}: not in the manifest")
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            what = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no regular file"
            raise StagingError(f"{staged / path}: expected {size} bytes, found {what}")
    for path in sorted(expected):
        raise StagingError(f"{staged / path}: in the manifest, but was not written")


def make_durable(staged: Path, dir_mode: int, file_mode: int) -> None:
    """Give everything its mode and fsync it: files first, then directories from below.

    Raises: OSError.
    """
    for directory, _, names, descriptor in os.fwalk(staged, topdown=False):
        for name in names:
            _settle(name, descriptor, file_mode)
        tree.set_mode(descriptor, dir_mode)
        tree.sync_directory(Path(directory))


def _settle(name: str, directory: int, mode: int) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        tree.set_mode(file, mode)
        os.fsync(file)
    finally:
        os.close(file)
