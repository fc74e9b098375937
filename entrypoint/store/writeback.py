"""Linux calls that Python does not offer, for writing large files and for room. Only advice.

`os.posix_fallocate` will not do: where the file system cannot allocate, glibc writes into every
block instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: a file that a kill cut short shall be as long as what was written."""

_AT_FDCWD = -100
_EXCHANGE = 2

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: begin to write dirty pages out, without waiting."""


def preallocate(descriptor: int, size: int) -> None:
    """Take room for `size` bytes at once, where the file system can.

    Raises: OSError when there is no room, before a byte is written.
    """
    if size == 0:
        return
    if _LIBRARY.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in _FULL:
            raise OSError(number, os.strerror(number))


def start(descriptor: int, offset: int, count: int) -> None:
    """Begin to write a range out, so that the fsync at the end has little left to wait for."""
    _LIBRARY.sync_file_range(
        descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), ctypes.c_uint(_WRITE)
    )


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system change places in one step. Raises: OSError.

    Not every file system can (EINVAL): see RENAME_EXCHANGE in renameat2(2).
    """
    here, words = ctypes.c_int(_AT_FDCWD), (os.fsencode(one), os.fsencode(other))
    if _LIBRARY.renameat2(here, words[0], here, words[1], ctypes.c_uint(_EXCHANGE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def settle(directory: Path) -> None:
    """Have a file system write all it has pending: btrfs frees deleted files only then."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    _LIBRARY.syncfs(descriptor)
    os.close(descriptor)
