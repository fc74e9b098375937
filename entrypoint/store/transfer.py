"""Copying a checkpoint's files from a store into staging, verified in the stream.

Measured, 3 GB cold and synced: reading, hashing and writing in pieces took two thirds of the time
of `copy_file_range` followed by a second read for the hash, since the pages come around twice.

A thread that waits for a dead mount is ended by exec and by exit where signals end it: on NFS, by
its manual, and on FUSE while the daemon takes no requests. One whose request a daemon took, and
never answers, is not: exec and exit wait for it until the mount is aborted. Seen on Linux 6.18 with
opens, and with reads where the daemon does without FUSE_ASYNC_READ. Nothing here can mend that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError, NotFoundError, StoreError
from entrypoint.store.base import CheckpointStaging, CheckpointStore

SILENCE_SECONDS: Final = 120.0
"""How long no byte may come. Longer than an NFS server that came back keeps its clients waiting
(90 s), and than the client of object stores tries again (80 s)."""

STALL_SECONDS: Final = 900.0
"""How long nothing may be moved, whoever is waited for: the fsync of a large file takes minutes on
a slow disk."""

_TICK_SECONDS = 0.05
_LEAVE_SECONDS = 0.5


class _StoppedError(Exception):
    """The copy has ended, by another thread's error or in the caller's thread."""


@dataclass
class _Work:
    """What the threads share. Attributes change under `changed`.

    `busy` threads run, and of these `reading` wait for the source. Of `copied`, which counts what
    was held as well, `fetched` bytes came from there.
    """

    source: CheckpointStore
    name: str
    staging: CheckpointStaging
    waiting: deque[FileEntry]
    missing: int
    copied: int = 0
    fetched: int = 0
    busy: int = 0
    reading: int = 0
    error: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)


def copy(
    source: CheckpointStore,
    name: str,
    manifest: Manifest,
    entries: Iterable[FileEntry],
    staging: CheckpointStaging,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy `entries` of the checkpoint `name` into `staging`, each verified and final.

    What is held there whole is read and left as it is: the commit makes it durable, and the rest is
    durable on return. Returns how many bytes came from the source.
    `on_bytes` hears, in the calling thread, of bytes as they are copied. On error, or when a
    signal's handler raises in this thread, all threads stop within a second and staging may hold
    any part of the files. So they do when no byte has come for `SILENCE_SECONDS`, or none has been
    moved for `STALL_SECONDS`; one that the kernel will not end stays behind.
    Raises: DamagedError naming the file, what was expected and found; StoreError; NotFoundError;
    SpaceError; StagingError.
    """
    # Largest first: no thread is left alone with the largest file at the end.
    largest_first = sorted(entries, key=lambda entry: entry.size, reverse=True)
    total = sum(entry.size for entry in largest_first)
    work = _Work(source, name, staging, deque(largest_first), missing=total)
    # Each in bounded pieces: memory does not grow with the checkpoint.
    work.busy = min(source.streams, len(largest_first))
    # Daemons: one that hangs in a dead mount must not keep the process.
    threads = [
        threading.Thread(target=_run, args=(work,), name=f"copy-{manifest.name}", daemon=True)
        for _ in range(work.busy)
    ]
    try:
        for thread in threads:
            thread.start()
        _watch(work, on_bytes)
        return work.fetched
    finally:
        work.stop.set()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _watch(work: _Work, on_bytes: Callable[[int], None]) -> None:
    told, heard = 0, time.monotonic()
    moved = heard
    while True:
        with work.changed:
            if work.busy and work.error is None:
                work.changed.wait(_TICK_SECONDS)
            copied, busy, error = work.copied, work.busy, work.error
            # Somebody who writes, or waits for the disk, is none of the source's business.
            waits = work.reading == busy and copied == told
        if error is not None:
            raise error
        now = time.monotonic()
        heard = heard if waits else now
        moved = moved if copied == told else now
        hint = "see if it still answers; `umount -f` ends a dead mount"
        if now - heard > SILENCE_SECONDS:
            msg = f"{work.source.where}: no byte of {work.name} came for {SILENCE_SECONDS:g} s"
            raise StoreError(msg, hint=hint)
        if now - moved > STALL_SECONDS:
            msg = f"{work.name}: no byte was read or written for {STALL_SECONDS:g} s"
            raise StoreError(msg, hint=hint)
        if copied > told:
            on_bytes(copied - told)
            told = copied
        if not busy:
            return


def _run(work: _Work) -> None:
    try:
        while not work.stop.is_set():
            try:
                entry = work.waiting.popleft()
            except IndexError:
                break
            _copy_file(work, entry)
    except BaseException as error:  # noqa: BLE001 - raised again, in the caller's thread
        with work.changed:
            work.error = work.error or error
        work.stop.set()
    finally:
        with work.changed:
            work.busy -= 1
            work.changed.notify()


def verify(source: CheckpointStore, manifest: Manifest) -> tuple[str, ...]:
    """Read every byte of a checkpoint, and return in words what is not as its manifest says.

    Raises: StoreError.
    """
    wrong: list[str] = []
    for entry in manifest.files:
        try:
            found = _digest_of(source, manifest.name, entry)
        except (DamagedError, NotFoundError) as error:
            wrong.append(str(error))
            continue
        if found != entry.blake3:
            wrong.append(f"{entry.path}: BLAKE3 is not the one in the manifest")
    return tuple(wrong)


def _digest_of(source: CheckpointStore, name: str, entry: FileEntry) -> str:
    hasher = blake3()
    with contextlib.closing(source.read(name, entry)) as pieces:
        for piece in pieces:
            hasher.update(piece)
    return str(hasher.hexdigest())


def _copy_file(work: _Work, entry: FileEntry) -> None:
    hasher, held = blake3(), 0
    with contextlib.closing(work.staging.held(entry)) as pieces:
        for piece in pieces:
            hasher.update(piece)
            held += len(piece)
            _count(work, len(piece))
    is_whole = 0 < held == entry.size
    if is_whole and str(hasher.hexdigest()) == entry.blake3:
        return
    try:
        # What is whole and wrong may be another checkpoint's file as well: it is never written to.
        if held <= entry.size and not is_whole:
            _write(work, entry, hasher, held)
            return
    except DamagedError:
        if not held:
            raise
    # What was left there is not how this file begins.
    work.staging.drop(entry)
    _count(work, -max(held, entry.size))
    _write(work, entry, blake3(), 0)


def _count(work: _Work, copied: int, fetched: int = 0) -> None:
    with work.changed:
        work.copied += copied
        work.fetched += fetched
        work.missing -= copied
    if work.stop.is_set():
        raise _StoppedError


def _write(work: _Work, entry: FileEntry, hasher: blake3, held: int) -> None:
    with contextlib.closing(_verified(work, entry, hasher, held)) as pieces:
        work.staging.write(entry, pieces, work.missing, held)


def _verified(work: _Work, entry: FileEntry, hasher: blake3, held: int) -> Generator[memoryview]:
    """Yield a file's pieces from `held` as they come, `hasher` having heard of those before.

    Raise behind the last one when all together are not the file's bytes.
    """
    with contextlib.closing(work.source.read(work.name, entry, held)) as pieces:
        while (piece := _next(work, pieces)) is not None:
            hasher.update(piece)
            yield piece
            _count(work, len(piece), fetched=len(piece))
    found = str(hasher.hexdigest())
    if found != entry.blake3:
        where = f"{work.source.where}: {work.name}/{entry.path}"
        raise DamagedError(
            f"{where}: BLAKE3 expected {entry.blake3}, found {found}",
            hint="the bytes in that store are not those that were saved; reject or remove it",
            file=entry.path,
        )


def _next(work: _Work, pieces: Generator[memoryview]) -> memoryview | None:
    with work.changed:
        work.reading += 1
    try:
        return next(pieces, None)
    finally:
        with work.changed:
            work.reading -= 1
