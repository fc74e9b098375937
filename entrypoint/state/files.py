"""Small files that are whole or absent, and reads that are bounded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.foreign import read_bounded

MAX_STATE_BYTES = 64 * 1024 * 1024


def write_atomically(
    path: Path,
    data: bytes,
    mode: int = 0o640,
    *,
    durable: bool = True,
    owner: tuple[int, int] | None = None,
) -> None:
    """Replace `path` by `data`: after a crash it holds the old bytes or the new ones, all of them.

    Without `durable`, a power loss may leave either, or a torn file; the disk is not waited for.
    `owner` is the uid and gid that it shall have, where that is not what this process gives.
    The last of two writers wins. On error the old file is untouched. Raises: OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            if owner is not None:
                os.fchown(descriptor, *owner)
            # The umask must not decide who can read it.
            os.fchmod(descriptor, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if durable:
        fsync_directory(path.parent)


def open_kept(path: Path, flags: int, mode: int) -> int:
    """Open a file that is kept and written to, or make it; no link is followed. Raises: OSError."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    refuse_linked(descriptor)
    return descriptor


def refuse_linked(descriptor: int) -> None:
    """As root, close a file that has another name: somebody may have linked one of root's there.

    Raises: OSError, with the descriptor closed.
    """
    if os.geteuid() == 0 and os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "another name of it lies elsewhere")


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Json, mode: int = 0o640, *, durable: bool = True) -> None:
    """Write canonical JSON with `write_atomically`. Raises: OSError."""
    write_atomically(path, canonical(value) + b"\n", mode, durable=durable)


def read_json(path: Path) -> Json:
    """Return what `path` holds, or None when it is absent, unreadable, or not JSON.

    Memory is only ever a short cut: what cannot be read is as good as forgotten.
    """
    try:
        value: Json = json.loads(read_bounded(path, MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value


def keep_newest(directory: Path, pattern: str, count: int) -> None:
    """Delete all but the `count` newest files that match; what cannot be deleted stays.

    Raises: OSError when the directory cannot be read.
    """
    found = list(directory.glob(pattern))
    if len(found) <= count:
        return
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[count:]:
        with contextlib.suppress(OSError):
            path.unlink()
