"""A disk that fills up: said with numbers, nothing is left; and others are evicted to make room."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import fill, make_checkpoint, make_key
from mounts import mounted
from store_contract import deep_verify, left_over
from store_driver import ACTS, BIG

from entrypoint.errors import SpaceError
from entrypoint.store import pins, transfer
from entrypoint.store.collect import make_room
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.space import Limits, require_room
from entrypoint.store.sweep import sweep


@pytest.fixture(params=["tmpfs", "ext4", "xfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DirectoryStore]:
    """A store with room for a checkpoint of 12 MB, but not for two."""
    with mounted(request.param, tmp_path, 300 if request.param == "xfs" else 30) as point:
        root = point / "store"
        root.mkdir()
        free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
        ballast = os.open(point / "ballast", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(ballast, 0, free - (18 << 20))
        os.close(ballast)
        yield DirectoryStore(root)


def test_a_save_into_a_full_disk_leaves_the_store_clean(small: DirectoryStore) -> None:
    first = make_checkpoint(small.root, tensors=BIG)

    def save() -> None:
        with small.stage("tiny") as staged:
            staged.commit(fill(staged, make_key(), tensors=BIG, seed=1))

    with pytest.raises(SpaceError, match=r"No space left on device: \d+ bytes free"):
        save()
    assert small.names() == [first.name]
    deep_verify(small, first.name)
    assert left_over(small) == []


def test_a_copy_into_a_full_disk_says_what_is_needed(small: DirectoryStore, tmp_path: Path) -> None:
    first = make_checkpoint(small.root, tensors=BIG)
    manifest = make_checkpoint(tmp_path / "shared", tensors=BIG, seed=1)
    shared = DirectoryStore(tmp_path / "shared")

    def pull() -> None:
        with small.stage(manifest.name) as staged:
            transfer.copy(shared, manifest.name, manifest, manifest.files, staged)
            staged.commit(manifest)

    with pytest.raises(SpaceError, match=r"\d+ more bytes needed, \d+ bytes free"):
        pull()
    assert small.names() == [first.name]
    assert left_over(small) == []
    with pytest.raises(SpaceError, match=f"{manifest.size} bytes needed"):
        require_room(small.root, manifest.size, Limits(0))
    small.retire(first.name)
    assert len(sweep(small.root, 60)) == 1
    require_room(small.root, manifest.size, Limits(0))
    pull()
    deep_verify(small, manifest.name)


PLACES = 20


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("act", ["save", "copy"])
def test_wherever_the_disk_fills_up_the_store_stays_clean(
    tmp_path: Path, kind: str, act: str
) -> None:
    manifest = make_checkpoint(tmp_path / "shared", tensors=BIG)
    with mounted(kind, tmp_path, 40) as point:
        root = point / "store"
        root.mkdir()
        store = DirectoryStore(root)
        for place in range(PLACES):
            leave(point, manifest.size * place // PLACES)
            with pytest.raises(SpaceError, match="No space left on device"):
                ACTS[act](root, tmp_path / "shared")
            assert (store.names(), left_over(store)) == ([], [])
        leave(point, 2 * manifest.size)
        ACTS[act](root, tmp_path / "shared")
        deep_verify(store, store.names()[0])


def leave(point: Path, count: int) -> None:
    """Have about `count` bytes left on a file system, even for root."""
    with (point / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        os.fsync(file.fileno())
        file.truncate(max(0, file.tell() - count))


def test_another_is_evicted_where_a_copy_would_not_fit(
    small: DirectoryStore, tmp_path: Path
) -> None:
    first = make_checkpoint(small.root, tensors=BIG)
    manifest = make_checkpoint(tmp_path / "shared", tensors=BIG, seed=1, name="wanted")
    shared = DirectoryStore(tmp_path / "shared")
    said: list[str] = []

    def room() -> None:
        state = tmp_path / "state"
        make_room(small, state, manifest.size, Limits(0), manifest.name, said.append)

    pins.pin(small.root, first.name, small.dir_mode)
    with pytest.raises(
        SpaceError, match=r"bytes needed and 0 kept in reserve, \d+ free; .* free 0"
    ):
        room()
    assert small.names() == [first.name]
    pins.unpin(small.root, first.name)
    room()
    assert [line.split(":")[0] for line in said] == [first.name]
    with small.stage(manifest.name) as staged:
        transfer.copy(shared, manifest.name, manifest, manifest.files, staged)
        staged.commit(manifest)
    assert small.names() == ["wanted"]
    deep_verify(small, "wanted")
