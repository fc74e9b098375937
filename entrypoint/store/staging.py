"""Staging: a private directory in the store's own file system where a checkpoint is built.

    ROOT/NAME/                                 published: complete, never written again
    ROOT/.staging/NAME.HOST.PID.NONCE/         being built; its builders hold a shared flock on it
    ROOT/.trash/NAME.NONCE/                    unpublished, waiting to be deleted

`commit` fsyncs everything, writes the manifest last and renames, so at any instant a published
name is absent or complete. Names are unique and publishing is one rename: the flock only tells
a sweep that a builder lives, and nothing breaks where it lies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Collection, Generator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from entrypoint.checkpoint.entry import FileEntry, check_path
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ShardbootError, SpaceError, StagingError
from entrypoint.store import durable, publish, trash, tree
from entrypoint.store.publish import CommitResult
from entrypoint.store.tree import DIR_MODE, FILE_MODE
from entrypoint.store.tree import write_all as write_all  # noqa: PLC0414 - for those who create()

STAGING = ".staging"

NOTE = ".copying"
"""In the staging of a copy: what is being copied, as `Manifest.part` says it."""

NOTE_BYTES = 64

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Staging:
    """One checkpoint being built. Leaving the `with` block uncommitted removes the directory.

    Several processes may build in one directory: one `begin`s it, others `join` it, and only
    the one that owns it removes it.
    """

    kept_note: ClassVar[str] = ""
    """The hidden file that stays until everything is durable, if any."""

    def __init__(
        self,
        root: Path,
        path: Path,
        *,
        owner: bool,
        dir_mode: int,
        file_mode: int,
    ) -> None:
        self.root = root
        self.path = path
        self.owner = owner
        self.dir_mode = dir_mode
        self.file_mode = file_mode
        self.held_bytes = 0
        self.directory = os.open(path, tree.DIRECTORY)
        with contextlib.suppress(OSError):
            # Without locks here, a sweep still has the grace to go by.
            # A sweep that looks whether somebody builds here holds the other kind for a moment.
            # No server waits for that: whoever joins has the lock of the one that began as well.
            fcntl.flock(self.directory, fcntl.LOCK_SH | (0 if owner else fcntl.LOCK_NB))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.owner:
                # Published, it is not under this name any more.
                tree.remove(self.path)
        finally:
            # The mount may be gone, and whatever went wrong before matters more.
            with contextlib.suppress(OSError):
                os.close(self.directory)

    def disown(self) -> None:
        """Leave the directory behind for processes that outlive this one; they commit it."""
        self.owner = False

    def hand_over(self) -> None:
        """Leave the directory to what this process becomes: the lock stays its own, across exec."""
        self.disown()
        os.set_inheritable(os.dup(self.directory), True)

    def give_up(self) -> bool:
        """Take the directory from all who build in it, and delete it; False if others were faster.

        It goes in one step: whoever still builds finds nothing there, and cannot commit half of it.
        """
        try:
            trash.discard(self.root, self.path, self.path.name, self.dir_mode)
        except FileNotFoundError:
            return False
        except OSError:
            # A full disk may have no room for a name in the trash, either.
            tree.remove(self.path)
        tree.remove(self.root / trash.TRASH / self.path.name)
        return True

    def create(self, path: str) -> int:
        """Create the file `path` and return a descriptor open for writing.

        Its mode is the final one, but that its owner may go on writing until the commit.
        Raises: ManifestError for a path that would leave staging; SpaceError; StagingError, also
        when the file is there.
        """
        # Hidden names at the top are the builders' notes; `commit` drops them.
        check_path(path.removeprefix(".") if "/" not in path else path, "path")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self.writing(path):
            descriptor = tree.open_beneath(self.directory, path, flags, self.dir_mode)
            try:
                tree.set_mode(descriptor, self.file_mode | stat.S_IWUSR)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    def write_file(self, path: str, data: bytes) -> None:
        """Create `path` with `data`, fsynced. On error part of it may be there.

        Raises: as `create`.
        """
        descriptor = self.create(path)
        with self.writing(path):
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(
        self,
        entry: FileEntry,
        pieces: Iterable[memoryview],
        missing: int | None = None,
        start: int = 0,
    ) -> None:
        """Make the file of `entry` out of the `start` bytes held of it and `pieces`, fsynced.

        On error part of it may be there. `missing` bytes have still to come, this file's among
        them; said where there is no room.
        Raises: as `create`; StagingError for another size; what `pieces` raises.
        """
        from entrypoint.store import writeback  # noqa: PLC0415 - ctypes, for copies alone

        descriptor = self.open(entry)
        try:
            with self.writing(entry.path, missing):
                offset = os.lseek(descriptor, start, os.SEEK_SET)
                writeback.preallocate(descriptor, entry.size)
                for piece in pieces:
                    write_all(descriptor, piece)
                    writeback.start(descriptor, offset, len(piece))
                    offset += len(piece)
                if offset != entry.size:
                    where = self.path / entry.path
                    raise StagingError(f"{where}: expected {entry.size} bytes, found {offset}")
                os.fsync(descriptor)
        finally:
            with self.writing(entry.path):
                os.close(descriptor)

    def drop_note(self) -> None:
        """Take back what told others whose bytes these are: they are about to be published."""

    def room_taken(self, entries: Iterable[FileEntry]) -> int:
        """Return how many bytes of `entries` the disk has given room already.

        Raises: StagingError.
        """
        taken = 0
        for entry in entries:
            with self.writing(entry.path), contextlib.suppress(FileNotFoundError):
                # Blocks may be preallocated far behind the end of what was written.
                blocks = os.stat(self.path / entry.path, follow_symlinks=False).st_blocks
                taken += min(entry.size, blocks * 512)
        return taken

    def held(self, _: FileEntry) -> Generator[memoryview]:
        """Yield what is there of a file before it is written: nothing in a new directory."""
        yield from ()

    def drop(self, entry: FileEntry) -> None:
        """Take away what `held` yielded. Raises: StagingError."""
        with self.writing(entry.path):
            (self.path / entry.path).unlink()

    def open(self, entry: FileEntry) -> int:
        """Return a descriptor to write the file of `entry` behind what is held of it."""
        return self.create(entry.path)

    @contextlib.contextmanager
    def writing(self, path: str, needed: int | None = None) -> Iterator[None]:
        """Turn the operating system's errors of writing `path` into ours, with the numbers."""
        try:
            yield
        except OSError as error:
            raise self.failure(error, path, needed) from error

    def failure(self, error: OSError, path: str, needed: int | None = None) -> ShardbootError:
        """Return what `error`, met while writing `path`, means to the user."""
        where = self.path / path
        if error.errno not in _FULL:
            return StagingError(f"{where}: {error.strerror or error}")
        free = os.fstatvfs(self.directory)
        room = f"{free.f_bavail * free.f_frsize} bytes free"
        need = "" if needed is None else f"{needed} more bytes needed, "
        return SpaceError(
            f"{where}: {error.strerror}: {need}{room}",
            hint="free some space (`shardboot gc`), or point the store at a larger file system",
        )

    def commit(
        self, manifest: Manifest, ranks: Collection[int] | None = None, *, repairs: bool = False
    ) -> CommitResult:
        """Publish what was built; `ranks` are those held here, None for all.

        One that `repairs` takes the place of an equal one, which it keeps the manifest's file of.
        On return a complete checkpoint is published and durable, under the manifest's name or a
        later generation of it. On error nothing was published, but for a failed last fsync.
        Raises: StagingError; SpaceError.
        """
        held = set(manifest.layout.ranks if ranks is None else ranks)
        with self.writing(""):
            durable.drop_notes(self.path, but=self.kept_note)
            durable.check(self.path, manifest.files_for(held), but=self.kept_note)
            durable.make_durable(self.path, self.dir_mode, self.file_mode)
            self.drop_note()
            modes = (self.dir_mode, self.file_mode)
            return publish.publish(self.root, self.path, manifest, held, modes, repairs=repairs)


def begin(
    root: Path, name: str, *, dir_mode: int = DIR_MODE, file_mode: int = FILE_MODE
) -> Staging:
    """Start building the checkpoint `name` in the store `root`, which must exist.

    Raises: ManifestError for a name with a path in it; StagingError; SpaceError.
    """
    with beginning(root, name, dir_mode) as path:
        path.mkdir(mode=0o700)
        return Staging(root, path, owner=True, dir_mode=dir_mode, file_mode=file_mode)


@contextlib.contextmanager
def beginning(root: Path, name: str, dir_mode: int) -> Iterator[Path]:
    """Yield a path of one's own for staging `name`, and turn the system's errors into ours."""
    check_path(name, "name")
    if "/" in name:
        msg = f"{name}: a checkpoint's name has no directories"
        raise StagingError(msg)
    # NAME_MAX is 255 bytes.
    unique = f"{name[:150]}.{host()}.{os.getpid()}.{os.urandom(4).hex()}"
    path = root / STAGING / unique
    try:
        tree.make_hidden(root, STAGING, dir_mode)
        yield path
    except OSError as error:
        if error.errno in _FULL:
            raise SpaceError(f"{path}: {error.strerror}") from error
        hint = "the store's directory must exist and be writable for this user"
        raise StagingError(f"{path}: {error.strerror}", hint=hint) from error


def host() -> str:
    """Return this host's name as staging names it."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", os.uname().nodename)[:40]


def join(path: Path, *, dir_mode: int = DIR_MODE, file_mode: int = FILE_MODE) -> Staging:
    """Build in a staging directory that another process of this user began and keeps.

    Raises: StagingError, also for another user's: who writes in the store may have put it there.
    """
    try:
        staging = Staging(
            path.parent.parent, path, owner=False, dir_mode=dir_mode, file_mode=file_mode
        )
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise StagingError(msg, hint="it was swept, or its owner gave up") from error
    owner = os.fstat(staging.directory).st_uid
    if owner != os.geteuid():
        os.close(staging.directory)
        raise StagingError(f"{path}: uid {owner} began it, and this is uid {os.geteuid()}")
    return staging
