"""A checkpoint's shard files in pieces, in the order of a load: which are cached; reading them."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read between two looks at whether anybody still wants it."""

SAMPLES: Final = 4
"""Places that tell whether all is cached, a microsecond each."""

BUFFER_BYTES: Final = 256 * 1024
"""What is read goes there and is forgotten."""


class Stretch(NamedTuple):
    """Bytes of a file, to be read in one go."""

    path: str
    offset: int
    size: int


def order(by_rank: Sequence[Sequence[tuple[str, int]]]) -> Iterator[Stretch]:
    """Yield all bytes of each rank's files, in the order in which they will be loaded.

    All ranks load at once, so they take turns; files are given as path and size.
    """
    turns = itertools.zip_longest(*(_stretches(files) for files in by_rank))
    return (stretch for turn in turns for stretch in turn if stretch is not None)


def _stretches(files: Sequence[tuple[str, int]]) -> Iterator[Stretch]:
    for path, size in files:
        for offset in range(0, size, PIECE_BYTES):
            yield Stretch(path, offset, min(PIECE_BYTES, size - offset))


def within(stretches: Iterator[Stretch], limit: float) -> Iterator[Stretch]:
    """Yield stretches as long as they are `limit` bytes at most, all together."""
    for stretch in stretches:
        limit -= stretch.size
        if limit < 0:
            return
        yield stretch


def is_cached(stretch: Stretch) -> bool:
    """Tell whether bytes all over it can be read without waiting for the disk.

    Raises: OSError where it cannot be opened, or the file system cannot tell.
    """
    byte, samples = bytearray(1), 2 * SAMPLES
    descriptor = _open(stretch.path)
    try:
        for at in range(1, samples, 2):
            place = stretch.offset + stretch.size * at // samples
            os.preadv(descriptor, [byte], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_all(stretches: Iterable[Stretch], parents: Collection[int]) -> None:
    """Read everything once, until done or none of `parents` is left.

    With a copy, though nobody wants it: to a virtual machine its host gives a page that a disk has
    written when a processor first touches it, and the loader is not to wait for that. Read ahead by
    sendfile(2) to the null device, 3 GB took 1.4 s to load and not 0.8 (`scripts/bench/ahead`).
    Raises: OSError.
    """
    buffer = bytearray(BUFFER_BYTES)
    for stretch in stretches:
        if os.getppid() not in parents:
            return
        descriptor = _open(stretch.path)
        try:
            _read(descriptor, stretch, buffer)
        finally:
            os.close(descriptor)


def _read(descriptor: int, stretch: Stretch, buffer: bytearray) -> None:
    done = 0
    while done < stretch.size:
        count = os.preadv(descriptor, [buffer], stretch.offset + done)
        if count == 0:
            # It has become shorter: the loader will say so.
            return
        done += count


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
