"""Pins and the trash of a store that several users write: modes, groups, names."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import fill, make_checkpoint, make_key

from entrypoint.errors import NotFoundError
from entrypoint.store import pins
from entrypoint.store.collect import collect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.retention import Rules


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


def test_a_pin_can_be_read_by_everybody_who_reads_the_store(store: DirectoryStore) -> None:
    before = os.umask(0o077)
    try:
        pins.pin(store.root, "any", 0o2770)
    finally:
        os.umask(before)
    assert stat.S_IMODE((store.root / ".pins").stat().st_mode) == 0o2775


def test_the_trash_has_the_modes_of_the_store_and_mends_those_of_a_killed_maker(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path, dir_mode=0o2770)
    tmp_path.chmod(0o2770)
    (tmp_path / ".trash").mkdir(mode=0o700)
    store.retire(make_checkpoint(tmp_path).name)
    assert stat.S_IMODE((tmp_path / ".trash").stat().st_mode) == 0o2770
    (tmp_path / ".trash").chmod(0o2775)
    store.retire(make_checkpoint(tmp_path).name)
    assert stat.S_IMODE((tmp_path / ".trash").stat().st_mode) == 0o2775


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become two members of a group")
def test_one_member_of_a_stores_group_collects_what_another_made() -> None:
    # Not in tmp_path, which only its owner may enter.
    base = Path(tempfile.mkdtemp(prefix="shardboot-group-"))
    base.chmod(0o755)
    store = DirectoryStore(base / "store", dir_mode=0o2770, file_mode=0o660)
    store.root.mkdir()
    os.chown(store.root, 5001, 5000)
    store.root.chmod(0o2770)

    def build() -> None:
        for name in ("first", "second"):
            with store.stage(name) as staged:
                staged.commit(fill(staged, make_key()).renamed(name))
            os.utime(store.path(name) / "manifest.json", (len(name), len(name)))
        store.retire("first")

    def gather() -> None:
        with store.stage("third") as staged:
            staged.commit(fill(staged, make_key()).renamed("third"))
        done = collect(store, base / "state", Rules(grace=0), dry_run=False)
        assert {v.name: v.reason for v in done.verdicts} == {
            "third": "newest",
            "second": "superseded",
        }
        assert done.trash == ()

    try:
        as_member(5001, build)
        as_member(5002, gather)
        assert store.names() == ["third"]
    finally:
        shutil.rmtree(base)


def as_member(uid: int, act: Callable[[], None]) -> None:
    """Run `act` in a process of group 5000."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(5000, 5000, 5000)
        os.setresuid(uid, uid, uid)
        status = 1
        try:
            act()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pinning_needs_a_plain_name(store: DirectoryStore) -> None:
    for name in ("../x", "a/b", ".hidden", ""):
        with pytest.raises(Exception, match="name"):
            pins.pin(store.root, name, store.dir_mode)
    assert pins.pinned(store.root) == frozenset()
    with pytest.raises(NotFoundError):
        store.read_manifest("x")
