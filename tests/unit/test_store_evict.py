"""Making room in a real directory: who goes, and who never does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fill, make_key
from releases import serve, three
from store_contract import left_over

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import SpaceError
from entrypoint.store import lock, pins
from entrypoint.store.collect import make_room
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.space import Limits, used_bytes


class Room:
    """Asks for room, and keeps what was said."""

    def __init__(self, store: DirectoryStore, state: Path) -> None:
        self.store, self.state = store, state
        self.said: list[str] = []

    def make(self, needed: int, most: int, wanted: str | None = None) -> None:
        make_room(self.store, self.state, needed, Limits(0, most), wanted, self.said.append)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    (tmp_path / "store").mkdir()
    return Room(DirectoryStore(tmp_path / "store"), tmp_path / "state")


@pytest.fixture(autouse=True)
def releases(room: Room) -> list[Manifest]:
    """Three releases of one deployment, oldest first."""
    return three(room.store)


def test_what_fits_evicts_nobody(room: Room) -> None:
    room.make(100, used_bytes(room.store.root) + 100)
    assert len(room.store.names()) == 3
    assert room.said == []


def test_the_least_recently_served_goes_and_no_more_than_needed(
    room: Room, releases: list[Manifest]
) -> None:
    serve(room.state, releases[0], pid=1 << 21, time=time.time())
    room.make(100, used_bytes(room.store.root))
    assert room.store.names() == ["of-0.32", "of-0.30"]
    (line,) = room.said
    assert line == f"of-0.31: {releases[1].size} bytes, last made use of 29 d ago"
    assert os.listdir(room.store.root / ".trash") == []


def test_where_evicting_all_would_not_do_nobody_goes(room: Room, releases: list[Manifest]) -> None:
    pins.pin(room.store.root, "of-0.31", room.store.dir_mode)
    held = lock.hold_manifest(room.store.path("of-0.30"), releases[0].digest)
    used = used_bytes(room.store.root)
    free = releases[2].size
    says = f"{free + 1} bytes needed, {used} of at most {used} in use; .* would free {free}"
    with pytest.raises(SpaceError, match=says) as caught:
        room.make(free + 1, used)
    assert "unpin" in caught.value.hint
    assert len(room.store.names()) == 3
    os.close(held)


def test_the_one_wanted_is_not_evicted_for_itself(room: Room, releases: list[Manifest]) -> None:
    room.make(100, used_bytes(room.store.root), wanted="of-0.30")
    assert room.store.names() == ["of-0.32", "of-0.30"]


def test_a_victim_that_is_taken_into_use_meanwhile_stays(
    room: Room, releases: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    sole = lock.sole

    def late(checkpoint: Path) -> Any:
        if checkpoint.name == "of-0.30":
            serve(room.state, releases[0])
        return sole(checkpoint)

    monkeypatch.setattr(lock, "sole", late)
    with pytest.raises(SpaceError, match=r"of-0.30 stays after all: a process has just begun"):
        room.make(100, used_bytes(room.store.root))
    assert "of-0.30" in room.store.names()
    assert room.said == []


def test_what_waits_in_the_trash_is_deleted_before_anybody_is_evicted(room: Room) -> None:
    room.store.retire("of-0.30")
    asked = []
    real = used_bytes(room.store.root)

    def short(root: Path) -> int:
        asked.append(root)
        return real if len(asked) > 1 else real + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entrypoint.store.space.used_bytes", short)
        room.make(100, real + 100)
    assert os.listdir(room.store.root / ".trash") == []
    assert len(room.store.names()) == 2


def test_what_a_killed_copy_has_left_goes_before_anybody_is_evicted(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    with room.store.stage("killed") as killed:
        fill(killed, make_key())
        killed.disown()
    used = used_bytes(room.store.root)
    left = sum(path.stat().st_size for path in killed.path.rglob("*") if path.is_file())

    def all_bytes(root: Path) -> int:
        return used + (left if killed.path.exists() else 0)

    monkeypatch.setattr("entrypoint.store.space.used_bytes", all_bytes)
    room.make(left, used + left)
    assert room.said == [f"{killed.path.name}: what a builder who died has left"]
    assert left_over(room.store) == []
    assert len(room.store.names()) == 3
