"""Reading a checkpoint into the page cache while vLLM starts, by a process that outlives exec.

Seconds of imports lie between exec and the first byte that vLLM reads: time to have them in memory.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import itertools
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from entrypoint.checkpoint.manifest import Manifest

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Read between two looks at whether vLLM is still there."""

SAMPLED_FILES: Final = 16
SAMPLES: Final = 4
"""Places in a file that tell whether it is cached: 64 calls of a microsecond at most."""

BUFFER_BYTES: Final = 256 * 1024
"""What it reads goes there and is forgotten."""

NAME: Final = "shardboot-ahead"
"""What the list of processes shows; the kernel keeps 15 characters."""


class Stretch(NamedTuple):
    """Bytes of a file, to be read in one go."""

    path: str
    offset: int
    size: int
    is_last: bool = False


def start(directory: Path, manifest: Manifest, ranks: Sequence[int], heir: int = 0) -> int | None:
    """Start to read the shard files of `ranks`; return the pid that has to be waited for.

    None where all of them seem to be cached, or no process is to be had. This one holds no lock,
    none of our descriptors, and no memory that others need; it gets only what time of processor
    and disk nobody else wants. It ends with its parent, whatever that has become, unless the
    process `heir` adopts it then.
    """
    by_rank = [
        [(str(directory / e.path), e.size) for e in manifest.files_for([rank]) if e.rank == rank]
        for rank in ranks
    ]
    if all(map(_seems_cached, _spread([file for files in by_rank for file in files]))):
        return None
    parents = (os.getpid(), heir)
    try:
        pid = os.fork()
    except OSError:
        # No process is to be had; vLLM will say so itself, if it needs one.
        return None
    return pid or _read(by_rank, parents)


def order(by_rank: Sequence[Sequence[tuple[str, int]]]) -> Iterator[Stretch]:
    """Yield all bytes of each rank's files, in the order in which they will be loaded.

    All ranks load at once, so they take turns; files are given as path and size.
    """
    turns = itertools.zip_longest(*(_stretches(files) for files in by_rank))
    return (stretch for turn in turns for stretch in turn if stretch is not None)


def within(stretches: Iterator[Stretch], limit: int) -> Iterator[Stretch]:
    """Yield stretches as long as they are `limit` bytes at most, all together."""
    for stretch in stretches:
        limit -= stretch.size
        if limit < 0:
            return
        yield stretch


def _stretches(files: Sequence[tuple[str, int]]) -> Iterator[Stretch]:
    for path, size in files:
        for offset in range(0, size, PIECE_BYTES):
            left = size - offset
            yield Stretch(path, offset, min(PIECE_BYTES, left), is_last=left <= PIECE_BYTES)


def _spread(files: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return some of many files, from first to last."""
    return files[:: -(-len(files) // SAMPLED_FILES) or 1]


def _seems_cached(file: tuple[str, int]) -> bool:
    """Tell whether bytes all over a file can be read without waiting for the disk."""
    path, size = file
    byte = bytearray(1)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for at in range(SAMPLES):
                os.preadv(descriptor, [byte], size * (2 * at + 1) // (2 * SAMPLES), os.RWF_NOWAIT)
        finally:
            os.close(descriptor)
    except OSError:
        # BlockingIOError where it is not; others where the file system cannot tell.
        return False
    return True


def _read(by_rank: Sequence[Sequence[tuple[str, int]]], parents: Collection[int]) -> NoReturn:
    """Be the process that reads. Nothing of it comes back into the code that was forked."""
    try:
        _step_aside()
        from entrypoint.headroom import free_bytes  # noqa: PLC0415 - the parent needs it not

        # vLLM's own memory comes out of the rest.
        _read_all(within(order(by_rank), free_bytes() // 2), parents)
    finally:
        os._exit(0)


def _step_aside() -> None:
    """Let go of all that was inherited, and come after everybody else."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    # With the manifest's descriptor goes our share in its lock.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:  # noqa: PLR2004 - stderr
            with suppress(OSError):  # the look itself
                os.close(descriptor)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    # For the disk, too: a process of this class has the idle I/O priority, if not told otherwise.
    # In a session of its own it would be a group of its own, and no such class could hold it back.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _read_all(stretches: Iterator[Stretch], parents: Collection[int]) -> None:
    """Read everything once, until done or none of `parents` is left.

    With a copy, though nobody wants it: to a virtual machine its host gives a page that a disk has
    written when a processor first touches it, and the loader is not to wait for that. Read ahead by
    sendfile(2) to the null device, 3 GB took 1.4 s to load and not 0.8 (`scripts/bench/ahead`).
    """
    opened: dict[str, int] = {}
    buffer = bytearray(BUFFER_BYTES)
    for stretch in stretches:
        if os.getppid() not in parents:
            return
        if stretch.path not in opened:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened[stretch.path] = os.open(stretch.path, flags)
        done = 0
        while done < stretch.size:
            count = os.preadv(opened[stretch.path], [buffer], stretch.offset + done)
            if count == 0:
                return
            done += count
        if stretch.is_last:
            # There may be more files than a process may have open.
            os.close(opened.pop(stretch.path))
