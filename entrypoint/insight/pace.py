"""How fast a directory is: large files, small ones, and fsync. Every measurement ends in time.

What is measured is what shardboot does there: large writes that are written back on the way and
synced, cold reads in large pieces, small files made and synced one by one.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.insight.crew import together
from entrypoint.insight.findings import Latency, Rate
from entrypoint.store import writeback
from entrypoint.store.tree import write_all

SMALL_BYTES: Final = 4096
MOST_SMALL: Final = 8000
"""Small files made at most; all must be deleted again."""

_MOST_SYNCS: Final = 1000
_MOST_UNSYNCED: Final = 256 * 1024 * 1024


Thing = TypeVar("Thing")


class Lane(NamedTuple):
    """A range of a file, for one reader."""

    path: Path
    begin: int
    end: int


def write(paths: Sequence[Path], size: int, seconds: float) -> Rate:
    """Write a new file of at most `size` bytes at each path at once, synced. Raises: OSError."""

    def work(number: int, begin: Callable[[], None]) -> int:
        # Nothing that compresses: zeros cost some file systems nothing.
        piece = memoryview(os.urandom(PIECE_BYTES))
        descriptor = os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        begin()
        return _write_synced(descriptor, piece, size, time.monotonic() + seconds)

    return together(len(paths), work)


def _write_synced(descriptor: int, piece: memoryview, size: int, deadline: float) -> int:
    """Write until a deadline; sync no more at once than what will be through by then."""
    done, begun = 0, time.monotonic()
    until_sync = len(piece)
    while done < size and (now := time.monotonic()) < deadline:
        if done:
            fits = done / (now - begun) * (deadline - now) / 2
            until_sync = int(min(max(fits, len(piece)), _MOST_UNSYNCED))
        end = min(size, done + until_sync)
        while done < end:
            count = min(len(piece), end - done)
            write_all(descriptor, piece[:count])
            writeback.start(descriptor, done, count)
            done += count
        os.fsync(descriptor)
    return done


def read_cold(lanes: Sequence[Lane], seconds: float, *, is_ours: bool) -> tuple[Rate, str]:
    """Read all lanes at once; return how fast, and how the page cache was kept out of it.

    With `O_DIRECT` where that works; else the pages of our own files are given back first. Those
    of others may be in use: they are read as they lie, and that is said. Raises: OSError.
    """
    ways = {_way(lane.path, is_ours=is_ours) for lane in lanes}
    way = min(ways, key=("as it lies", "posix_fadvise", "O_DIRECT").index)

    def work(number: int, begin: Callable[[], None]) -> int:
        lane = lanes[number]
        flag = os.O_DIRECT if way == "O_DIRECT" else 0
        descriptor = os.open(lane.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flag)
        if is_ours:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin()
        return _read(descriptor, lane, time.monotonic() + seconds)

    return together(len(lanes), work), way


def _way(path: Path, *, is_ours: bool) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return "posix_fadvise" if is_ours else "as it lies"
    try:
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return "posix_fadvise" if is_ours else "as it lies"
    finally:
        os.close(descriptor)
    return "O_DIRECT"


def _read(descriptor: int, lane: Lane, deadline: float) -> int:
    # Memory of its own pages, as O_DIRECT wants it.
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    offset = lane.begin
    while offset < lane.end and time.monotonic() < deadline:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            break
        offset += count
    return min(offset, lane.end) - lane.begin


def lanes_of(path: Path, begin: int, end: int, count: int) -> list[Lane]:
    """Cut a range of a file into so many lanes, at pages as O_DIRECT wants it."""
    step = max(1, math.ceil((end - begin) / count / PIECE_BYTES)) * PIECE_BYTES
    starts = range(begin, end, step)
    return [Lane(path, start, min(end, start + step)) for start in starts]


def make_small(directory: Path, count: int, most: int, seconds: float, *, synced: bool) -> Rate:
    """Make at most so many small files, each worker in a directory of its own; synced or not.

    Raises: OSError.
    """

    def work(number: int, begin: Callable[[], None]) -> int:
        own = directory / str(number)
        own.mkdir(parents=True)
        data = os.urandom(SMALL_BYTES)
        share = range(max(1, min(most, MOST_SMALL) // count))
        begin()
        return each(share, seconds, lambda n: _make(own / str(n), data, synced))

    return together(count, work)


def _make(path: Path, data: bytes, synced: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
        if synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def visit_small(
    directory: Path, count: int, seconds: float, visit: Callable[[Path], object]
) -> Rate:
    """Do something to each small file that `make_small` made. Raises: OSError."""

    def work(number: int, begin: Callable[[], None]) -> int:
        paths = sorted((directory / str(number)).iterdir())
        begin()
        return each(paths, seconds, visit)

    return together(count, work)


def each(things: Sequence[Thing], seconds: float, act: Callable[[Thing], object]) -> int:
    """Act on one after the other, the first at least, until the time is over; return how many."""
    deadline = time.monotonic() + seconds
    for done, thing in enumerate(things):
        if done and time.monotonic() > deadline:
            return done
        act(thing)
    return len(things)


def sync_latency(path: Path, seconds: float) -> Latency:
    """Overwrite a page of a new file and sync it, again and again. Raises: OSError."""
    took: list[float] = []
    page = os.urandom(SMALL_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, page, 0)
        os.fsync(descriptor)
        deadline = time.monotonic() + seconds
        while not took or (time.monotonic() < deadline and len(took) < _MOST_SYNCS):
            begun = time.monotonic()
            os.pwrite(descriptor, page, 0)
            os.fsync(descriptor)
            took.append(time.monotonic() - begun)
    finally:
        os.close(descriptor)
    took.sort()
    return Latency(len(took), statistics.median(took), took[math.ceil(len(took) * 0.99) - 1])
