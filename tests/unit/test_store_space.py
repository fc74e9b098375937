from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint.errors import SpaceError, StoreError
from entrypoint.store.space import Limits, require_room, used_bytes


def free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_what_fits_is_let_through(tmp_path: Path) -> None:
    require_room(tmp_path, 1, Limits(1))
    require_room(tmp_path, 1000, Limits(0, 1000))


def test_the_reserve_is_kept(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match=r"1000 bytes needed and \d+ kept in reserve, \d+ free"):
        require_room(tmp_path, 1000, Limits(free(tmp_path) * 2))


def test_the_bound_counts_what_the_store_holds(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path)
    part = make_checkpoint(tmp_path, seed=1, ranks=[0])
    used = whole.size + sum(entry.size for entry in part.files_for([0]))
    assert used_bytes(tmp_path) == used
    require_room(tmp_path, 10, Limits(0, used + 10))
    with pytest.raises(SpaceError, match=f"11 bytes needed, {used} of at most {used + 10} in use"):
        require_room(tmp_path, 11, Limits(0, used + 10))


def test_what_cannot_be_read_takes_room_all_the_same(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path)
    (tmp_path / manifest.name / "manifest.json").write_text("{}")
    assert used_bytes(tmp_path) == manifest.size + 2


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        require_room(tmp_path / "nowhere", 1, Limits(0))
