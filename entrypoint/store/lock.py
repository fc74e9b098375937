"""Kernel locks. They save work and never carry correctness: with a no-op `flock` all still holds.

The kernel gives a lock back when its holder dies, so there is none to break by hand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from entrypoint.checkpoint import manifest
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES
from entrypoint.errors import DamagedError, LockTimeoutError, ManifestError, StoreError
from entrypoint.state.files import open_kept

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What file systems without locks answer."""

_POLL_SECONDS = 0.1
_HOLD_SECONDS = 5.0


@contextlib.contextmanager
def exclusive(
    path: Path, timeout: float, on_wait: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold the lock file `path`, which is made if missing and left behind.

    `on_wait` hears one line when another process holds it, or when there are no locks on that
    file system and the block runs without.
    Raises: LockTimeoutError naming the holder after `timeout` seconds; StoreError.
    """
    try:
        descriptor = open_kept(path, os.O_RDWR, 0o660)
    except OSError as error:
        hint = "if another user has worked there, chown it once with all that lies in it"
        raise StoreError(f"{path}: {error.strerror}", hint=hint) from error
    try:
        if acquire(descriptor, path, fcntl.LOCK_EX, timeout, on_wait):
            with contextlib.suppress(OSError):
                # For people only: a full disk must not cost the lock.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        give_back(descriptor)


def give_back(descriptor: int) -> None:
    """Unlock and close. On return the next one to ask can have it, on this mount or another.

    Closing alone would leave it to whoever was forked meanwhile, and hangs. And JuiceFS unlocks
    when the kernel sends RELEASE, which it does some time after close(2) has returned: the next one
    to ask would find a holder.
    """
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def acquire(
    descriptor: int,
    path: Path,
    kind: int,
    timeout: float,
    on_wait: Callable[[str], None] = lambda _: None,
) -> bool:
    """Take a lock of a `kind` on an open file; say whether there are locks where it lies.

    `on_wait` as for `exclusive`. Raises: LockTimeoutError after `timeout` seconds; StoreError.
    """
    deadline = time.monotonic() + timeout
    told = False
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise StoreError(f"{path}: {error.strerror}") from error
            on_wait(f"{path}: no locks on this file system ({error.strerror}); going on without")
            return False
        else:
            return True
        if time.monotonic() >= deadline:
            raise LockTimeoutError(
                f"{path}: held by {_holder(descriptor)} for more than {timeout:g} s",
                hint="see what that process does; its lock ends with it",
            )
        if not told:
            on_wait(f"{path}: waiting for {_holder(descriptor)}")
            told = True
        time.sleep(_POLL_SECONDS)


def _holder(descriptor: int) -> str:
    word = b""
    with contextlib.suppress(IsADirectoryError):
        word = os.pread(descriptor, 20, 0).strip()
    return f"process {int(word)}" if word.isdigit() else "another process"


def hold_manifest(checkpoint: Path, manifest_digest: str) -> int:
    """Return a descriptor with a shared lock on the manifest of `checkpoint`; exec keeps both.

    While it is open, nothing that asks for the lock collects the checkpoint. Once held, the path
    is looked at again: it still is that file, and says what `manifest_digest` stands for.
    Raises: DamagedError when it does not; LockTimeoutError; StoreError.
    """
    path = checkpoint / MANIFEST
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}; it was there a moment ago") from error
    try:
        acquire(descriptor, path, fcntl.LOCK_SH, _HOLD_SECONDS)
        _still_is(descriptor, path, manifest_digest)
        os.set_inheritable(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _still_is(descriptor: int, path: Path, expected: str) -> None:
    held = os.fstat(descriptor)
    try:
        there = path.lstat()
        data = os.pread(descriptor, min(held.st_size, MAX_MANIFEST_BYTES) + 1, 0)
        found = manifest.digest_in(data)
    except (OSError, ManifestError) as error:
        raise DamagedError(f"{path}: changed while it was locked: {error}") from error
    if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
        raise DamagedError(f"{path}: replaced while it was locked")
    if found != expected:
        raise DamagedError(f"{path}: expected the manifest {expected}, found {found}")


@contextlib.contextmanager
def sole(checkpoint: Path) -> Iterator[OSError | None]:
    """Hold the exclusive lock on the manifest of `checkpoint`; yield why not, where it is not had.

    BlockingIOError means that a server holds it; any other error, that nobody can tell. Waits for
    nobody, and changes nothing.
    """
    path = checkpoint / MANIFEST
    try:
        descriptor = _open_to_lock(path)
    except OSError as error:
        yield error
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error
        else:
            yield None
    finally:
        give_back(descriptor)


def _open_to_lock(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # NFS gives an exclusive lock only to those who may write (flock(2)).
        return os.open(path, os.O_RDWR | flags)
    except OSError:
        return os.open(path, os.O_RDONLY | flags)


def is_kept(path: Path) -> bool:
    """Tell whether its file system keeps the exclusive lock that this process has on a file.

    Raises: OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_free(checkpoint: Path) -> bool:
    """Tell whether no server holds the checkpoint; True where locks lie. Changes nothing."""
    with sole(checkpoint) as obstacle:
        return not isinstance(obstacle, BlockingIOError)
