from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from checkpoints import fill, make_checkpoint, make_key
from directory_contract import DirectoryContract
from store_contract import deep_verify

from entrypoint.errors import ConfigError, ManifestError, StagingError, StoreError
from entrypoint.store.base import open_store
from entrypoint.store.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


class TestOnTheTestsOwnDisk(DirectoryContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore:
        (tmp_path / "store").mkdir()
        return DirectoryStore(tmp_path / "store")


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o000, 0o777])
def test_modes_are_what_is_set_whatever_the_umask(store: DirectoryStore, umask: int) -> None:
    before = os.umask(umask)
    try:
        manifest = make_checkpoint(store.root)
    finally:
        os.umask(before)
    for path in [store.path(manifest.name), *store.path(manifest.name).rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o2750 if path.is_dir() else 0o640), path


def test_other_modes_can_be_asked_for(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, dir_mode=0o755, file_mode=0o444)
    with store.stage("tiny") as staged:
        name = staged.commit(fill(staged, make_key())).name
    assert stat.S_IMODE(store.path(name).stat().st_mode) == 0o755
    assert stat.S_IMODE((store.path(name) / "manifest.json").stat().st_mode) == 0o444


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_the_group_of_a_store_with_setgid_is_inherited(store: DirectoryStore) -> None:
    os.chown(store.root, -1, 4242)
    store.root.chmod(0o2770)
    manifest = make_checkpoint(store.root)
    paths = [store.path(manifest.name), *store.path(manifest.name).rglob("*")]
    assert {path.stat().st_gid for path in paths} == {4242}


def test_a_directory_without_a_manifest_and_a_hidden_one_are_not_listed(
    store: DirectoryStore,
) -> None:
    manifest = make_checkpoint(store.root)
    (store.root / "half").mkdir()
    (store.root / "a-file").write_text("")
    (store.root / "linked").symlink_to(store.path(manifest.name))
    store.path(manifest.name).rename(store.root / ".hidden")
    (store.root / "odd").mkdir()
    (store.root / "odd" / "manifest.json").mkdir()
    assert store.names() == []


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "not-mounted")
    with pytest.raises(StoreError, match="not-mounted"):
        store.names()
    with pytest.raises(StagingError, match="not-mounted"):
        store.stage("tiny")


def test_links_are_not_followed(store: DirectoryStore, tmp_path: Path) -> None:
    manifest = make_checkpoint(store.root)
    directory = store.path(manifest.name)
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("/etc/hostname")
    (directory / "templates").rename(tmp_path / "templates")
    (directory / "templates").symlink_to(tmp_path / "templates")
    for path in ("config.json", "templates/chat.jinja"):
        with pytest.raises(StoreError):
            store.open(manifest.name, path)


def test_a_fifo_is_refused_at_once(store: DirectoryStore) -> None:
    manifest = make_checkpoint(store.root)
    path = store.path(manifest.name) / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="regular"):
        store.open(manifest.name, "config.json")


def test_a_manifest_of_no_bounds_is_not_read(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(store.root)
    monkeypatch.setattr("entrypoint.store.directory.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(ManifestError, match="at most 100 bytes"):
        store.read_manifest(manifest.name)


def test_looking_and_reading_change_nothing(store: DirectoryStore) -> None:
    manifest = make_checkpoint(store.root)
    before = {p: p.stat().st_mtime_ns for p in [store.root, *store.root.rglob("*")]}
    store.names()
    store.read_manifest(manifest.name)
    os.close(store.open(manifest.name, "config.json"))
    assert before == {p: p.stat().st_mtime_ns for p in [store.root, *store.root.rglob("*")]}


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/mnt/shared", "/mnt/shared"),
        ("file:///mnt/shared", "/mnt/shared"),
        ("file://localhost/mnt/a%20b", "/mnt/a b"),
    ],
)
def test_a_path_or_a_file_url_names_a_directory(url: str, root: str) -> None:
    store = open_store(url, dir_mode=0o700, file_mode=0o600)
    assert isinstance(store, DirectoryStore)
    assert (store.root, store.dir_mode, store.file_mode) == (Path(root), 0o700, 0o600)
    assert store.where == root


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://host/x", "https://"),
        ("file://host/x", "file:///"),
        ("relative/path", "absolute"),
        ("file:///x?y", "file:///"),
        ("", "absolute"),
    ],
)
def test_other_urls_are_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


@pytest.mark.parametrize("name", ["a/b", "..", ".x", ""])
def test_a_name_is_no_path(store: DirectoryStore, name: str) -> None:
    with pytest.raises((ManifestError, StagingError)):
        store.stage(name)


def test_where_modes_links_and_directory_fsyncs_are_unknown_a_checkpoint_still_is_whole(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_permitted(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    real = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fchmod", not_permitted)
    monkeypatch.setattr(os, "link", not_permitted)
    monkeypatch.setattr(os, "fsync", files_only)
    for ranks in ([0], [1], [0, 1]):
        name = make_checkpoint(store.root, ranks=ranks).name
        assert store.names() == [name]
        deep_verify(store, name)
