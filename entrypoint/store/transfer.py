"""Copying a checkpoint's files from a store into staging, verified in the stream.

Measured, 3 GB cold and synced: reading, hashing and writing in pieces took two thirds of the time
of `copy_file_range` followed by a second read for the hash, since the pages come around twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.checkpoint.manifest import FileEntry, Manifest
from entrypoint.errors import DamagedError, StoreError
from entrypoint.store import writeback
from entrypoint.store.base import CheckpointStore
from entrypoint.store.staging import Staging, write_all

THREADS = 4
"""Four pieces in memory, however large the checkpoint."""

_TRIES = 4
_FLAKY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
"""What a shared file system may answer once and not again."""

_PATIENCE_SECONDS = 0.2
_TICK_SECONDS = 0.05
_LEAVE_SECONDS = 0.5


@dataclass
class _Work:
    """What the threads share. Attributes change under `lock`, which `changed` belongs to."""

    source: CheckpointStore
    name: str
    staging: Staging
    waiting: deque[FileEntry]
    missing: int
    copied: int = 0
    busy: int = 0
    error: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)


def copy(
    source: CheckpointStore,
    name: str,
    manifest: Manifest,
    entries: Iterable[FileEntry],
    staging: Staging,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy `entries` of the checkpoint `name` into `staging`, each verified, fsynced and final.

    `on_bytes` hears, in the calling thread, of bytes as they are copied. On error, or when a
    signal's handler raises in this thread, all threads stop within a second and staging may hold
    any part of the files: the caller drops it.
    Raises: DamagedError naming the file, what was expected and found; StoreError; NotFoundError;
    SpaceError; StagingError.
    """
    # Largest first: no thread is left alone with the largest file at the end.
    largest_first = sorted(entries, key=lambda entry: entry.size, reverse=True)
    total = sum(entry.size for entry in largest_first)
    work = _Work(source, name, staging, deque(largest_first), missing=total)
    work.busy = min(THREADS, len(largest_first))
    # Daemons: one that hangs in a dead mount must not keep the process.
    threads = [
        threading.Thread(target=_run, args=(work,), name=f"copy-{manifest.name}", daemon=True)
        for _ in range(work.busy)
    ]
    try:
        for thread in threads:
            thread.start()
        _watch(work, on_bytes)
    finally:
        work.stop.set()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _watch(work: _Work, on_bytes: Callable[[int], None]) -> None:
    told = 0
    while True:
        with work.changed:
            if work.busy and work.error is None:
                work.changed.wait(_TICK_SECONDS)
            copied, busy, error = work.copied, work.busy, work.error
        if error is not None:
            raise error
        if copied > told:
            on_bytes(copied - told)
            told = copied
        if not busy:
            return


def _run(work: _Work) -> None:
    try:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while not work.stop.is_set():
            try:
                entry = work.waiting.popleft()
            except IndexError:
                break
            _copy_file(work, entry, buffer)
    except BaseException as error:  # noqa: BLE001 - raised again, in the caller's thread
        with work.changed:
            work.error = work.error or error
        work.stop.set()
    finally:
        with work.changed:
            work.busy -= 1
            work.changed.notify()


def _copy_file(work: _Work, entry: FileEntry, buffer: memoryview) -> None:
    reader = _Reader(work, entry)
    try:
        descriptor = work.staging.create(entry.path)
        try:
            _copy_pieces(work, entry, reader, descriptor, buffer)
        finally:
            with work.staging.writing(entry.path):
                os.close(descriptor)
    finally:
        reader.close()


def _copy_pieces(
    work: _Work, entry: FileEntry, reader: _Reader, descriptor: int, buffer: memoryview
) -> None:
    hasher = blake3()
    offset = 0
    with work.staging.writing(entry.path, work.missing):
        writeback.preallocate(descriptor, entry.size)
    while offset < entry.size:
        if work.stop.is_set():
            return
        piece = buffer[: reader.read(buffer, offset)]
        hasher.update(piece)
        with work.staging.writing(entry.path, work.missing):
            write_all(descriptor, piece)
            writeback.start(descriptor, offset, len(piece))
        reader.drop(offset, len(piece))
        offset += len(piece)
        with work.changed:
            work.copied += len(piece)
            work.missing -= len(piece)
    found = str(hasher.hexdigest())
    if found != entry.blake3:
        raise DamagedError(
            f"{reader.where}: BLAKE3 expected {entry.blake3}, found {found}",
            hint="the bytes in that store are not those that were saved; reject or remove it",
        )
    with work.staging.writing(entry.path):
        os.fsync(descriptor)


class _Reader:
    """Positional reads of one file of the source; the one place where reads are tried again."""

    def __init__(self, work: _Work, entry: FileEntry) -> None:
        self.work = work
        self.entry = entry
        self.where = f"{work.source.where}: {work.name}/{entry.path}"
        self.descriptor = -1
        self._trying(self._open)

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`, up to the end of the file; return the count, at least 1.

        Raises: StoreError, also when the file ends early; DamagedError when it is another size now.
        """
        wanted = buffer[: self.entry.size - offset]
        return self._trying(lambda: self._read_once(wanted, offset))

    def _read_once(self, wanted: memoryview, offset: int) -> int:
        if self.descriptor < 0:
            self._open()
        done = 0
        while done < len(wanted) and not self.work.stop.is_set():
            count = os.preadv(self.descriptor, [wanted[done:]], offset + done)
            if count == 0:
                # Some file systems end a read early while a server is away.
                raise OSError(errno.EIO, f"ends after {offset + done} bytes")
            done += count
        return done

    def _open(self) -> int:
        self.descriptor = self.work.source.open(self.work.name, self.entry.path)
        found = os.fstat(self.descriptor).st_size
        if found != self.entry.size:
            raise DamagedError(f"{self.where}: expected {self.entry.size} bytes, found {found}")
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return 0

    def _trying(self, action: Callable[[], int]) -> int:
        for attempt in range(1, _TRIES):
            try:
                return action()
            except (OSError, StoreError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in _FLAKY:
                    raise self._failure(error) from error
            # A stale handle stays stale: only opening again helps.
            self.close()
            self.work.stop.wait(_PATIENCE_SECONDS * attempt)
        try:
            return action()
        except (OSError, StoreError) as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError | StoreError) -> StoreError:
        reason = error.strerror or error if isinstance(error, OSError) else error
        return StoreError(f"{self.where}: {reason}")

    def drop(self, offset: int, count: int) -> None:
        """Give the source's pages back: nobody here reads them again."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.descriptor, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            # A dead mount answers even this with an error; nothing read can be lost by it.
            with contextlib.suppress(OSError):
                os.close(descriptor)
