"""What of a file is in the page cache, and how to get it out of there."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import pytest


def cached(path: Path) -> float:
    """Return which share of a file's pages is in memory (mincore(2))."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        memory = ctypes.c_char.from_buffer(mapped)
        where, size = ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None, use_errno=True).mincore(where, size, vector)
        del memory
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in vector) / pages


def evict(path: Path) -> None:
    """Have the kernel forget a file's pages; on tmpfs there is no other place for them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def evict_all(paths: Iterable[Path]) -> list[Path]:
    """Have nothing of these files in memory, and return them; skip the test where they stay."""
    found = sorted(paths)
    for path in found:
        evict(path)
    if any(map(cached, found)):
        pytest.skip("files stay in memory here")
    return found
