"""Going on with a copy that a kill, a signal or a dead mount has interrupted.

A copy's staging says whose bytes it holds. Whoever copies the same next adopts it, by renaming it
to a name of its own, and reads what is there: nothing is taken on trust, nothing is truncated.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from types import TracebackType

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.manifest import FileEntry
from entrypoint.errors import Interrupted, StoreError
from entrypoint.store import lock, sweep, tree
from entrypoint.store.staging import STAGING, Staging, beginning

NOTE = ".copying"
"""In staging: what is being copied, as `Manifest.part` says it. A commit drops it."""

_NOTE_BYTES = 64


class CopyStaging(Staging):
    """A copy being built. A signal, or a store that goes away, leaves it for the next one."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Interrupted | StoreError):
            self.disown()
        super().__exit__(kind, error, trace)

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
                return tree.open_beneath(self.directory, entry.path, os.O_WRONLY)
            except FileNotFoundError:
                return self.create(entry.path)


def begin(root: Path, name: str, part: str, *, dir_mode: int, file_mode: int) -> CopyStaging:
    """Go on with a copy of the very `part` that was interrupted, or start a new one.

    One for other ranks has files that a commit of ours would refuse.

    Raises: as `staging.begin`.
    """
    with beginning(root, name, dir_mode) as path:
        adopted = _adopt_any(root / STAGING, part, path)
        if adopted is None:
            path.mkdir(mode=0o700)
        staging = CopyStaging(
            root, path, owner=True, dir_mode=dir_mode, file_mode=file_mode, adopted=adopted
        )
    with contextlib.ExitStack() as giving_up:
        giving_up.push(staging)
        if adopted is None:
            staging.write_file(NOTE, part.encode())
        else:
            found = [status.st_size for _, status in tree.files_beneath(staging.path)]
            staging.held_bytes = sum(found) - len(part)
        giving_up.pop_all()
    return staging


def _adopt_any(staged: Path, part: str, target: Path) -> int | None:
    """Rename what a dead copier of `part` left to `target`; return a descriptor with its lock.

    Where locks lie, only what a builder of this host has left counts; were one taken from a builder
    that lives, both would write the same bytes, and the builder's commit would fail.
    """
    for note in sorted(staged.glob(f"*/{NOTE}")):
        # A builder lives, or somebody was faster, or it may not be touched: there are others.
        with contextlib.suppress(OSError, ValueError):
            descriptor = _adopt(note.parent, part, target)
            if descriptor is not None:
                return descriptor
    return None


def _adopt(path: Path, part: str, target: Path) -> int | None:
    with contextlib.ExitStack() as giving_up:
        descriptor = os.open(path, tree.DIRECTORY)
        giving_up.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_left = lock.is_kept(path) or sweep.builder_is_dead(path.name)
        if not is_left or read_bounded(path / NOTE, _NOTE_BYTES) != part.encode():
            return None
        path.rename(target)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        giving_up.pop_all()
        return descriptor
