"""A directory tree touched by descriptor: no link is followed, nothing outside is reached.

Paths are relative, with plain components, and have passed `entry.check_path`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from entrypoint.state.files import fsync_directory

_NOT_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What file systems answer that do not do a thing at all."""

DIR_MODE = 0o2750
FILE_MODE = 0o640

_UNFINISHED = 0o700
"""Mode of a directory that was just made, until it gets the one that it is to have."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def descend(root: int, parts: tuple[str, ...], make_mode: int | None = None) -> Iterator[int]:
    """Yield a descriptor of the directory `parts` below `root`, closed afterwards.

    With `make_mode`, directories that are missing are made with just that mode. Raises: OSError.
    """
    descriptor = os.dup(root)
    try:
        for part in parts:
            below = _enter(descriptor, part, make_mode)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(parent: int, name: str, make_mode: int | None) -> int:
    if make_mode is None:
        return os.open(name, DIRECTORY, dir_fd=parent)
    try:
        os.mkdir(name, _UNFINISHED, dir_fd=parent)
        made = True
    except FileExistsError:
        made = False
    descriptor = os.open(name, DIRECTORY, dir_fd=parent)
    if made:
        try:
            set_mode(descriptor, make_mode)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def open_beneath(root: int, path: str, flags: int, make_mode: int | None = None) -> int:
    """Open the file `path` below `root`; no component may be a link. Raises: OSError."""
    *directories, name = path.split("/")
    with descend(root, tuple(directories), make_mode) as parent:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)


def open_regular(root: int, path: str) -> int:
    """Open a regular file below `root` for reading. Raises: OSError, also for other kinds."""
    # Opening a FIFO would wait for a writer.
    descriptor = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        msg = f"{path}: not a regular file"
        raise OSError(msg)
    return descriptor


def files_beneath(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every non-directory below `root` by its relative path, links as links.

    Raises: OSError.
    """
    for directory, _, names, descriptor in os.fwalk(root, onerror=_raise):
        for name in names:
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            yield os.path.relpath(os.path.join(directory, name), root), status


def _raise(error: OSError) -> None:
    raise error


def remove(path: Path, parent: int | None = None) -> bool:
    """Delete a tree, in an open directory if one is given, as far as it goes; say if it is gone.

    NFS keeps `.nfsXXXX` names of open files (EBUSY, ENOTEMPTY); that is nobody's failure.
    """
    import shutil  # noqa: PLC0415 - a hit removes nothing

    shutil.rmtree(path, ignore_errors=True, dir_fd=parent)
    try:
        os.stat(path, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def make_hidden(root: Path, name: str, mode: int) -> None:
    """Make a hidden directory of a store, with just that mode, unless it is there. Raises: OSError.

    One of ours that whoever made it could not give its mode any more, killed, gets it now.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        hidden = _enter(descriptor, name, mode)
        try:
            status = os.fstat(hidden)
            if status.st_mode & 0o777 == _UNFINISHED and status.st_uid == os.geteuid():
                set_mode(hidden, mode)
        finally:
            os.close(hidden)
    finally:
        os.close(descriptor)


def entries(directory: Path) -> list[Path]:
    """Return what lies in a hidden directory; one of ours is never a link."""
    try:
        descriptor = os.open(directory, DIRECTORY)
    except OSError:
        return []
    try:
        return sorted(directory / name for name in os.listdir(descriptor))
    finally:
        os.close(descriptor)


def set_mode(descriptor: int, mode: int) -> None:
    """Give an open file or directory its mode: the umask must not decide who can read it.

    Where a mount decides about modes (CIFS, vfat, object stores through FUSE), it stands as it is.
    Raises: OSError.
    """
    if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode:
        return
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, as far as its file system can. Raises: OSError."""
    try:
        fsync_directory(path)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however few bytes the system takes at a time. Raises: OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
