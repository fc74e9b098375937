"""The page cache, as it is before a load: emptied of some files, or full of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PIECE_BYTES: Final = 8 * 1024 * 1024


def drop(files: Sequence[Path]) -> bool:
    """Drop what is cached of `files`; tell whether it is gone, as far as anybody can say.

    They must be synced: what the disk lacks stays. Raises: OSError.
    """
    gone = [_drop(path) for path in files]
    return all(gone)


def _drop(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return not _is_cached(descriptor, os.fstat(descriptor).st_size // 2)
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Tell whether a byte can be had without waiting for a disk; False where nobody can say."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except OSError:
        # Not cached, or not told by this file system.
        return False


def fetch(files: Sequence[Path]) -> None:
    """Read `files`, so that they are cached if there is memory for them. Raises: OSError."""
    buffer = bytearray(PIECE_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
