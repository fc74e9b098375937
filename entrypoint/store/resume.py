"""Going on with a copy that a kill, a signal or a dead mount has interrupted.

A copy's staging says whose bytes it holds. Whoever copies the same next adopts it, by renaming it
to a name of its own, and reads what is there: nothing is taken on trust, nothing is truncated.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator
from pathlib import Path
from types import TracebackType

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.errors import Interrupted, NotFoundError, StoreError
from entrypoint.state.files import refuse_linked
from entrypoint.store import lock, sweep, tree
from entrypoint.store.staging import NOTE, NOTE_BYTES, STAGING, Staging, beginning


class CopyStaging(Staging):
    """A copy being built. A signal, or a store that goes away, leaves it for the next one.

    Its note says what is being copied, as `Manifest.part` does, and is locked as long as somebody
    builds here: a lock on a directory is known to one kernel alone on NFS and on FUSE.
    """

    kept_note = NOTE

    def __init__(self, root: Path, path: Path, note: int, *, dir_mode: int, file_mode: int) -> None:
        self._note = note
        super().__init__(root, path, owner=True, dir_mode=dir_mode, file_mode=file_mode)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Interrupted | StoreError | NotFoundError):
            self.disown()
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        note, self._note = self._note, -1
        if note >= 0:
            lock.give_back(note)

    def drop_note(self) -> None:
        """Take back what told others whose bytes these are: they are about to be published."""
        # Deleted while it is open, it would stay under another name on NFS.
        self._unlock()
        (self.path / NOTE).unlink()

    def held(self, entry: FileEntry) -> Generator[memoryview]:
        """Yield what an interrupted copy has left of a file. Raises: StagingError."""
        with self.writing(entry.path):
            try:
                descriptor = tree.open_regular(self.directory, entry.path)
            except FileNotFoundError:
                return
            with open(descriptor, "rb", buffering=0) as file:
                buffer = memoryview(bytearray(min(PIECE_BYTES, entry.size + 1)))
                while count := file.readinto(buffer):
                    yield buffer[:count]

    def open(self, entry: FileEntry) -> int:
        """Return a descriptor to write the file of `entry` behind what is held of it."""
        with self.writing(entry.path):
            try:
                descriptor = tree.open_beneath(self.directory, entry.path, os.O_WRONLY)
            except FileNotFoundError:
                return self.create(entry.path)
            refuse_linked(descriptor)
            return descriptor


def begin(root: Path, name: str, part: str, *, dir_mode: int, file_mode: int) -> CopyStaging:
    """Go on with a copy of the very `part` that was interrupted, or start a new one.

    One for other ranks has files that a commit of ours would refuse.
    Raises: as `staging.begin`.
    """
    with beginning(root, name, dir_mode) as path:
        note = _adopt_any(root / STAGING, part, path)
        is_new = note is None
        if note is None:
            path.mkdir(mode=0o700)
            note = _write_note(path, part, file_mode)
        staging = CopyStaging(root, path, note, dir_mode=dir_mode, file_mode=file_mode)
    if not is_new:
        with contextlib.ExitStack() as giving_up:
            giving_up.push(staging)
            with staging.writing(""):
                found = [status.st_size for _, status in tree.files_beneath(path)]
            giving_up.pop_all()
        staging.held_bytes = sum(found) - len(part)
    return staging


def _write_note(path: Path, part: str, mode: int) -> int:
    """Write the note of a new copy; return a descriptor that holds its lock. Raises: OSError."""
    # Locked before it has its name: nobody adopts what somebody is about to build in.
    unnamed = path / f"{NOTE}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        tree.set_mode(descriptor, mode | stat.S_IWUSR)
        tree.write_all(descriptor, part.encode())
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path / NOTE)
    except BaseException:
        os.close(descriptor)
        tree.remove(path)
        raise
    return descriptor


def _adopt_any(staged: Path, part: str, target: Path) -> int | None:
    """Rename what a dead copier of `part` left to `target`; return a descriptor of its locked note.

    Where locks lie, only what a builder of this host has left counts; were one taken from a builder
    that lives, both would write the same bytes to the same places, and the builder's commit fail.
    """
    for note in sorted(staged.glob(f"*/{NOTE}")):
        # A builder lives, or somebody was faster, or it may not be touched: there are others.
        with contextlib.suppress(OSError):
            descriptor = _adopt(note, part, target)
            if descriptor is not None:
                return descriptor
    return None


def _adopt(note: Path, part: str, target: Path) -> int | None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.ExitStack() as giving_up:
        descriptor = os.open(note, flags)
        giving_up.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_left = lock.is_kept(note) or sweep.builder_is_dead(note.parent.name)
        if not is_left or os.pread(descriptor, NOTE_BYTES + 1, 0) != part.encode():
            return None
        # To whoever sweeps by age alone it is young again.
        os.utime(note.parent)
        note.parent.rename(target)
        giving_up.pop_all()
        return descriptor
