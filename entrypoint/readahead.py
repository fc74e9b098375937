"""Reading a checkpoint into the page cache while vLLM starts, by a process that outlives exec.

Seconds of imports lie between exec and the first byte that vLLM reads: time to have them in memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.stretches import Stretch, is_cached, order, read_all, within

SAMPLED_FILES: Final = 16
"""With what is looked at of each, 64 calls of a microsecond at most."""

NAME: Final = "shardboot-ahead"
"""What the list of processes shows; the kernel keeps 15 characters."""


def start(
    directory: Path, manifest: Manifest, ranks: Sequence[int], heir: int = 0, keeps: float = 0
) -> int | None:
    """Start to read the shard files of `ranks`; return the pid that has to be waited for.

    None where all of them seem to be cached, or no process is to be had. This one holds no lock,
    none of our descriptors, and no memory that others need; it gets only what time of processor
    and disk nobody else wants. It ends with its parent, whatever that has become, unless the
    process `heir` adopts it then. As long as that lives, it goes on to keep so many bytes cached
    as `keeps` tells.
    """
    by_rank = [
        [(str(directory / e.path), e.size) for e in manifest.files_for([rank]) if e.rank == rank]
        for rank in ranks
    ]
    if not keeps and all(
        map(_seems_cached, _spread([file for files in by_rank for file in files]))
    ):
        return None
    parents = (os.getpid(), heir)
    try:
        pid = os.fork()
    except OSError:
        # No process is to be had; vLLM will say so itself, if it needs one.
        return None
    return pid or _read(by_rank, parents, keeps)


def _spread(files: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return some of many files, from first to last."""
    return files[:: -(-len(files) // SAMPLED_FILES) or 1]


def _seems_cached(file: tuple[str, int]) -> bool:
    """Tell whether bytes all over a file are cached; False where the file system cannot tell."""
    try:
        return is_cached(Stretch(file[0], 0, file[1]))
    except OSError:
        return False


def _read(
    by_rank: Sequence[Sequence[tuple[str, int]]], parents: tuple[int, int], keeps: float
) -> NoReturn:
    """Be the process that reads. Nothing of it comes back into the code that was forked."""
    try:
        _step_aside()
        if keeps:
            from entrypoint.warm import keep  # noqa: PLC0415 - who keeps nothing needs it not

            # Where it cannot be told what is cached, it is read ahead as ever.
            with suppress(OSError):
                keep(by_rank, keeps, parents)
        from entrypoint.headroom import free_bytes  # noqa: PLC0415 - the parent needs it not

        # vLLM's own memory comes out of the rest.
        read_all(within(order(by_rank), free_bytes() // 2), parents)
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
