"""A copy that was interrupted is gone on with: from what is there, and only if it is right."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from checkpoints import Tensor, make_checkpoint
from store_contract import deep_verify, left_over

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import (
    DamagedError,
    Interrupted,
    NotFoundError,
    ShardbootError,
    SpaceError,
    StoreError,
)
from entrypoint.store import directory, durable, transfer
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.staging import NOTE
from entrypoint.store.sweep import abandoned, sweep

BIG: tuple[Tensor, ...] = tuple((f"layers.{n}.weight", "U8", (1 << 20,), 1 << 20) for n in range(6))
MOST = 9 << 20
IN_FLIGHT = directory.STREAMS * (1 << 17)
"""What the threads may have read and not yet written, or written and not yet counted."""


class Counting(DirectoryStore):
    """Counts what is read of it, and calls `then` after so many bytes."""

    def __init__(self, root: Path, after: int = 1 << 60, then: Callable[[], object] = int) -> None:
        super().__init__(root)
        self.count, self.after, self.then = 0, after, then

    def read(self, name: str, entry: FileEntry, start: int = 0) -> Generator[memoryview]:
        with contextlib.closing(super().read(name, entry, start)) as pieces:
            for piece in pieces:
                # In small pieces, so that a file can be cut anywhere.
                for offset in range(0, len(piece), 1 << 16):
                    yield piece[offset : offset + (1 << 16)]
                    self.count += min(1 << 16, len(piece) - offset)
                    if self.count >= self.after:
                        self.then()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "shared", tensors=BIG)
    return tmp_path / "shared"


@pytest.fixture
def manifest(shared: Path) -> Manifest:
    return make_checkpoint(shared, tensors=BIG)


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "local").mkdir()
    return DirectoryStore(tmp_path / "local")


def copy(source: Counting, local: DirectoryStore, manifest: Manifest) -> int:
    """Copy; return how many bytes were read of the source."""
    with local.stage(manifest.name, manifest.content) as staged:
        transfer.copy(source, manifest.name, manifest, manifest.files, staged)
        staged.commit(manifest)
    return source.count


def kill_in_copy(shared: Path, local: DirectoryStore, manifest: Manifest, after: int) -> None:
    """Let another process copy, and be killed once it has read so many bytes."""
    child = os.fork()
    if child == 0:
        try:
            die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            copy(Counting(shared, after, die), local, manifest)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def interrupt(local: DirectoryStore, manifest: Manifest, error: BaseException) -> None:
    """Leave a copy by an error."""
    with (
        contextlib.suppress(type(error)),
        local.stage(manifest.name, manifest.content) as staged,
    ):
        entry = manifest.files[-1]
        transfer.copy(DirectoryStore(local.root), manifest.name, manifest, [], staged)
        staged.write(entry, [memoryview(bytes(entry.size))])
        raise error


def parts(local: DirectoryStore) -> list[Path]:
    """Return the weights that lie in staging."""
    return sorted((local.root / ".staging").glob("*/*.safetensors"))


@pytest.mark.parametrize("after", [1 << 18, 3 << 20, MOST])
def test_a_killed_copy_is_gone_on_with(
    shared: Path, local: DirectoryStore, manifest: Manifest, after: int
) -> None:
    kill_in_copy(shared, local, manifest, after)
    with local.stage(manifest.name, manifest.content) as staged:
        assert abs(staged.held_bytes - after) <= IN_FLIGHT
        staged.disown()
    again = copy(Counting(shared), local, manifest)
    assert again <= manifest.size - after + IN_FLIGHT
    deep_verify(local, manifest.name)
    assert left_over(local) == []


def test_a_copy_that_is_killed_again_and_again_gets_there(
    shared: Path, local: DirectoryStore, manifest: Manifest
) -> None:
    for _ in range(manifest.size // (2 << 20)):
        kill_in_copy(shared, local, manifest, 1 << 20)
    # So many kills had been the end of a copy that begins anew each time.
    assert copy(Counting(shared), local, manifest) < manifest.size // 2
    deep_verify(local, manifest.name)


def test_what_was_left_is_read_and_replaced_where_it_is_wrong(
    shared: Path, local: DirectoryStore, manifest: Manifest
) -> None:
    kill_in_copy(shared, local, manifest, MOST)
    for part in parts(local):
        with part.open("r+b") as file:
            file.write(b"x")
    copy(Counting(shared), local, manifest)
    deep_verify(local, manifest.name)


def test_what_was_left_longer_than_it_may_be_is_replaced(
    shared: Path, local: DirectoryStore, manifest: Manifest
) -> None:
    kill_in_copy(shared, local, manifest, MOST)
    with parts(local)[0].open("ab") as file:
        file.write(bytes(MOST))
    copy(Counting(shared), local, manifest)
    deep_verify(local, manifest.name)


def test_wrong_bytes_in_the_source_are_said_even_behind_right_ones(
    shared: Path, local: DirectoryStore, manifest: Manifest
) -> None:
    kill_in_copy(shared, local, manifest, MOST)
    for path in (shared / manifest.name).glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
    with pytest.raises(DamagedError, match="BLAKE3"):
        copy(Counting(shared), local, manifest)
    assert (local.names(), left_over(local)) == ([], [])


@pytest.mark.parametrize(
    "error", [Interrupted(signal.SIGTERM), StoreError("gone"), NotFoundError("unmounted")], ids=repr
)
def test_a_signal_and_a_store_that_goes_away_leave_it(
    local: DirectoryStore, manifest: Manifest, error: BaseException
) -> None:
    interrupt(local, manifest, error)
    assert len(left_over(local)) == 1
    assert local.names() == []


@pytest.mark.parametrize("error", [DamagedError("bits"), SpaceError("full")], ids=repr)
def test_what_would_only_be_in_the_way_is_not_left(
    local: DirectoryStore, manifest: Manifest, error: ShardbootError
) -> None:
    interrupt(local, manifest, error)
    assert left_over(local) == []


def test_what_waits_for_its_commit_is_adopted_and_young_again(
    shared: Path, local: DirectoryStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "make_durable", stop)
        with pytest.raises(Interrupted):
            copy(Counting(shared), local, manifest)
    [left] = (local.root / ".staging").iterdir()
    os.utime(left, (1, 1))
    with local.stage(manifest.name, manifest.content) as staged:
        assert staged.held_bytes == manifest.size
        assert abandoned(local.root, 60) == []
        assert time.time() - staged.path.stat().st_mtime < 60
        staged.disown()
    again = Counting(shared)
    assert copy(again, local, manifest) == 0
    deep_verify(local, manifest.name)


def test_a_sweep_spares_what_is_about_to_be_gone_on_with(
    local: DirectoryStore, manifest: Manifest
) -> None:
    interrupt(local, manifest, StoreError("gone"))
    left = left_over(local)
    sweep(local.root, -1, spare=manifest.content)
    assert left_over(local) == left
    sweep(local.root, -1, spare=manifest.part([0]))
    assert left_over(local) == []


def test_files_that_shall_be_read_only_can_be_gone_on_with(
    shared: Path, tmp_path: Path, manifest: Manifest
) -> None:
    (tmp_path / "local").mkdir()
    local = DirectoryStore(tmp_path / "local", 0o550, 0o440)
    kill_in_copy(shared, local, manifest, MOST)
    assert {path.stat().st_mode & 0o777 for path in parts(local)} == {0o640}
    copy(Counting(shared), local, manifest)
    found = {path.stat().st_mode & 0o777 for path in local.path(manifest.name).glob("*.*")}
    assert found == {0o440}


def test_room_that_was_given_before_is_not_asked_for_again(
    shared: Path, local: DirectoryStore, manifest: Manifest
) -> None:
    kill_in_copy(shared, local, manifest, MOST)
    with local.stage(manifest.name, manifest.content) as staged:
        assert staged.held_bytes <= staged.room_taken(manifest.files) + IN_FLIGHT
        assert staged.room_taken(manifest.files) <= manifest.size


def test_what_lives_is_not_taken(local: DirectoryStore, manifest: Manifest) -> None:
    with (
        local.stage(manifest.name, manifest.content) as one,
        local.stage(manifest.name, manifest.content) as other,
    ):
        assert one.path != other.path
        assert len(left_over(local)) == 2


def test_only_a_copy_of_the_same_is_taken(
    local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    interrupt(local, manifest, StoreError("gone"))
    [left] = left_over(local)
    other = make_checkpoint(tmp_path / "other")
    with local.stage(manifest.name, other.content) as staged:
        assert list(staged.held(manifest.files[-1])) == []
    with local.stage(manifest.name) as saved:
        assert list(saved.held(manifest.files[-1])) == []
    assert left_over(local) == [left]


def test_where_locks_lie_only_what_a_dead_builder_of_this_host_left_is_taken(
    local: DirectoryStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    interrupt(local, manifest, StoreError("gone"))
    [left] = (local.root / ".staging").iterdir()
    theirs = left.rename(left.with_name(f"{manifest.name}.elsewhere.1.00"))
    with local.stage(manifest.name, manifest.content):
        assert theirs.exists()
    ours = theirs.rename(left)
    with local.stage(manifest.name, manifest.content):
        assert not ours.exists()


def test_a_note_that_is_a_link_or_too_long_is_nobodys(
    local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text(manifest.content)
    for number in "012":
        (local.root / ".staging" / number).mkdir(parents=True)
    (local.root / ".staging/0" / NOTE).symlink_to(tmp_path / "note")
    (local.root / ".staging/1" / NOTE).write_text(manifest.content + "x")
    (local.root / ".staging/2" / NOTE).mkdir()
    with local.stage(manifest.name, manifest.content):
        assert set(left_over(local)) >= {"0", "1", "2"}
