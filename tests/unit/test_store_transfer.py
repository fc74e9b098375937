from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from store_contract import deep_verify, left_over

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import (
    DamagedError,
    Interrupted,
    NotFoundError,
    ShardbootError,
    SpaceError,
    StagingError,
    StoreError,
)
from entrypoint.store import directory, pieces, transfer, writeback
from entrypoint.store.directory import DirectoryStore


@pytest.fixture
def shared(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "shared").mkdir()
    return DirectoryStore(tmp_path / "shared")


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "local").mkdir()
    return DirectoryStore(tmp_path / "local")


@pytest.fixture
def manifest(shared: DirectoryStore) -> Manifest:
    return make_checkpoint(shared.root)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PATIENCE_SECONDS", 0.01)


@pytest.fixture
def thawed() -> Iterator[threading.Event]:
    """What frozen threads wait for; none outlives its test."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("copy-"):
            thread.join()


def pull(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    with local.stage(manifest.name) as staged:
        transfer.copy(shared, manifest.name, manifest, manifest.files, staged, on_bytes)
        staged.commit(manifest)


def nothing_is_left(local: DirectoryStore) -> bool:
    copying = [t.name for t in threading.enumerate() if t.name.startswith("copy-")]
    return local.names() == [] and left_over(local) == [] and copying == []


def failing(times: int, number: int) -> Callable[..., int]:
    """Return a `preadv` that fails the first `times` times."""
    real = os.preadv
    left = [times]
    lock = threading.Lock()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with lock:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    return preadv


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_an_error_that_passes_is_tried_again(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(directory, "STREAMS", 1)
    monkeypatch.setattr(os, "preadv", failing(3, number))
    pull(shared, local, manifest)
    deep_verify(local, manifest.name)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_an_error_that_stays_names_the_store_and_the_file(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(os, "preadv", failing(10**6, number))
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        pull(shared, local, manifest)
    assert str(shared.root) in str(caught.value)
    assert manifest.name in str(caught.value)
    assert nothing_is_left(local)


@pytest.mark.parametrize(
    ("kind", "number"), [(StoreError, errno.ESTALE), (NotFoundError, errno.ENOENT)]
)
def test_an_open_that_fails_for_a_moment_is_tried_again(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ShardbootError],
    number: int,
) -> None:
    monkeypatch.setattr(directory, "STREAMS", 1)
    real = DirectoryStore.open
    left = [2]

    def stale(self: DirectoryStore, name: str, path: str) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise kind("for a moment") from OSError(number, os.strerror(number))
        return real(self, name, path)

    monkeypatch.setattr(DirectoryStore, "open", stale)
    pull(shared, local, manifest)
    deep_verify(local, manifest.name)


def test_short_reads_and_short_writes_are_no_errors(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preadv, write = os.preadv, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
    pull(shared, local, manifest)
    deep_verify(local, manifest.name)


def test_a_read_that_ends_early_is_said(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(StoreError, match="ends after 0 bytes"):
        pull(shared, local, manifest)
    assert nothing_is_left(local)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_said(
    shared: DirectoryStore, local: DirectoryStore, manifest: Manifest, change: int
) -> None:
    entry = manifest.files[0]
    os.truncate(shared.path(manifest.name) / entry.path, entry.size + change)
    message = f"{entry.path}: expected {entry.size} bytes, found {entry.size + change}"
    with pytest.raises(DamagedError, match=message):
        pull(shared, local, manifest)
    assert nothing_is_left(local)


def test_a_file_that_is_not_there_is_not_found(
    shared: DirectoryStore, local: DirectoryStore, manifest: Manifest
) -> None:
    (shared.path(manifest.name) / manifest.files[0].path).unlink()
    with pytest.raises(NotFoundError, match=manifest.files[0].path):
        pull(shared, local, manifest)
    assert nothing_is_left(local)


@pytest.mark.parametrize("call", ["preallocate", "write"])
def test_a_full_disk_says_what_is_needed_and_what_is_free(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where: object = os if call == "write" else writeback
    with monkeypatch.context() as patch:
        patch.setattr(where, call, full)
        with pytest.raises(SpaceError, match=rf"{manifest.size} more bytes needed, \d+ bytes free"):
            pull(shared, local, manifest)
    assert nothing_is_left(local)


def test_a_write_error_is_stagings_and_not_tried_again(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", broken)
        with pytest.raises(StagingError, match="local"):
            pull(shared, local, manifest)
    assert nothing_is_left(local)


@pytest.mark.parametrize("error", [Interrupted(15), KeyboardInterrupt()])
def test_a_signal_in_the_callers_thread_stops_all_threads_within_a_second(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    slow = threading.Event()
    real = os.preadv

    def trickle(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        slow.wait(0.05)
        return real(descriptor, [buffers[0][:1]], offset)

    def interrupt(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "preadv", trickle)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4)
    started = time.monotonic()
    with pytest.raises(type(error)):
        pull(shared, local, manifest, interrupt)
    assert time.monotonic() - started < 2
    assert nothing_is_left(local)


def test_a_read_that_hangs_does_not_keep_the_caller(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    thawed: threading.Event,
) -> None:
    monkeypatch.setattr(directory, "STREAMS", 2)
    real = os.preadv
    first = threading.Lock()

    def frozen(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if first.acquire(blocking=False):
            raise OSError(errno.EACCES, "another thread's error")
        thawed.wait()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", frozen)
    started = time.monotonic()
    with pytest.raises(StoreError, match="another thread's error"):
        pull(shared, local, manifest)
    assert time.monotonic() - started < 2
    assert local.names() == []


def test_a_source_that_falls_silent_is_given_up(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    thawed: threading.Event,
) -> None:
    monkeypatch.setattr(transfer, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    real = os.preadv

    def freezing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 0:
            thawed.wait(20)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", freezing)
    started = time.monotonic()
    with pytest.raises(StoreError, match=f"no byte of {manifest.name} came for") as caught:
        pull(shared, local, manifest)
    assert time.monotonic() - started < 5
    assert str(shared.root) in str(caught.value)
    assert local.names() == []


def test_a_disk_that_is_slow_to_write_is_no_silence_of_the_source(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(directory, "STREAMS", 1)
    never = threading.Event()
    real = os.fsync
    waits = iter([0.6])

    def slow(descriptor: int) -> None:
        never.wait(next(waits, 0))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    pull(shared, local, manifest)
    deep_verify(local, manifest.name)


def test_a_disk_that_takes_nothing_for_long_ends_the_copy(
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    thawed: threading.Event,
) -> None:
    monkeypatch.setattr(transfer, "STALL_SECONDS", 0.2)
    real = os.fsync

    def frozen(descriptor: int) -> None:
        thawed.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", frozen)
    with pytest.raises(StoreError, match="no byte was read or written for"):
        pull(shared, local, manifest)


def test_progress_is_told_in_the_callers_thread_and_adds_up(
    shared: DirectoryStore, local: DirectoryStore, manifest: Manifest
) -> None:
    told: list[tuple[int, int]] = []
    pull(shared, local, manifest, lambda count: told.append((threading.get_ident(), count)))
    assert {ident for ident, _ in told} == {threading.get_ident()}
    assert sum(count for _, count in told) == manifest.size


def test_nothing_to_copy_is_a_copy(local: DirectoryStore, manifest: Manifest) -> None:
    with local.stage("tiny") as staged:
        transfer.copy(local, manifest.name, manifest, (), staged)
