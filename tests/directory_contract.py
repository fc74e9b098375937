"""What every store in a directory must do besides: subclass, and give `store`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import fill, make_checkpoint, make_key
from store_contract import StoreContract, deep_verify, left_over

from entrypoint.checkpoint.inspect import ranks_held
from entrypoint.errors import (
    Interrupted,
    ManifestError,
    NotFoundError,
    StagingError,
)
from entrypoint.store import transfer
from entrypoint.store.directory import DirectoryStore


class DirectoryContract(StoreContract):
    """What holds of directories on every file system besides."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore | Iterator[DirectoryStore]:
        raise NotImplementedError

    def spoil(self, store: DirectoryStore, name: str, path: str, data: bytes | None) -> None:
        file = store.path(name) / path
        file.unlink()
        if data is not None:
            file.write_bytes(data)

    def left_over(self, store: DirectoryStore) -> list[str]:
        return left_over(store)

    @pytest.fixture
    def other(self, tmp_path: Path) -> DirectoryStore:
        """Another store, to copy into."""
        root = tmp_path / "other"
        root.mkdir()
        return DirectoryStore(root)

    def test_a_committed_checkpoint_is_listed_and_reads_back(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root)
        assert store.names() == [manifest.name]
        assert store.read_manifest(manifest.name) == manifest.encode()
        deep_verify(store, manifest.name)
        assert left_over(store) == []

    def test_what_is_being_built_is_not_listed(self, store: DirectoryStore) -> None:
        with store.stage("tiny") as staged:
            fill(staged, make_key())
            assert store.names() == []
        assert store.names() == []
        assert left_over(store) == []

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
    def test_an_exception_removes_what_was_built(
        self, store: DirectoryStore, kind: type[BaseException]
    ) -> None:
        def build() -> None:
            with store.stage("tiny") as staged:
                fill(staged, make_key())
                raise kind

        with pytest.raises(kind):
            build()
        assert left_over(store) == []

    def test_the_newest_is_listed_first_and_ties_go_by_name(self, store: DirectoryStore) -> None:
        for name, seconds in (("b", 100), ("a", 100), ("old", 50), ("new", 200)):
            make_checkpoint(store.root, name=name)
            os.utime(store.root / name / "manifest.json", (seconds, seconds))
        assert store.names() == ["new", "a", "b", "old"]

    def test_an_equal_checkpoint_wins_over_ours(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root)
        inode = (store.path(manifest.name) / "index.json").stat().st_ino
        with store.stage(manifest.name) as staged:
            fill(staged, make_key())
            result = staged.commit(manifest)
        assert (result.name, result.outcome) == (manifest.name, "existed")
        assert (store.path(result.name) / "index.json").stat().st_ino == inode
        assert left_over(store) == []

    def test_other_bytes_get_the_next_generation(self, store: DirectoryStore) -> None:
        first, second, third = (make_checkpoint(store.root, seed=seed) for seed in range(3))
        assert second.name == f"{first.name}-g2"
        assert third.name == f"{first.name}-g3"
        for manifest in (first, second, third):
            assert deep_verify(store, manifest.name) == manifest

    @pytest.mark.parametrize("damage", ["truncated", "missing", "a link"])
    def test_a_damaged_equal_one_is_replaced_under_its_readers(
        self, store: DirectoryStore, damage: str
    ) -> None:
        manifest = make_checkpoint(store.root)
        shard = store.path(manifest.name) / manifest.files[0].path
        reader = store.open(manifest.name, manifest.files[1].path)
        if damage == "truncated":
            os.truncate(shard, 10)
        else:
            shard.unlink()
        if damage == "a link":
            shard.symlink_to("/etc/hostname")
        with store.stage(manifest.name) as staged:
            fill(staged, make_key())
            result = staged.commit(manifest)
        assert (result.name, result.outcome) == (manifest.name, "committed")
        deep_verify(store, manifest.name)
        assert len(os.pread(reader, 1 << 20, 0)) == manifest.files[1].size
        os.close(reader)

    def test_what_is_no_checkpoint_keeps_its_name(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root / "elsewhere")
        theirs = store.path(manifest.name)
        theirs.mkdir()
        (theirs / "precious").write_text("not ours")
        assert make_checkpoint(store.root).name == f"{manifest.name}-g2"
        assert (theirs / "precious").read_text() == "not ours"

    def test_only_some_ranks_are_said_in_have_json(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root, ranks=[1])
        directory = store.path(manifest.name)
        assert json.loads((directory / "have.json").read_text()) == {"ranks": [1]}
        deep_verify(store, manifest.name)
        assert not list(directory.glob("model-rank-0-*"))

    def test_ranks_that_are_missing_there_replace_it(self, store: DirectoryStore) -> None:
        first = make_checkpoint(store.root, ranks=[1])
        assert make_checkpoint(store.root).name == first.name
        deep_verify(store, first.name)
        assert not (store.path(first.name) / "have.json").exists()

    def test_ranks_that_only_the_one_there_holds_are_kept(self, store: DirectoryStore) -> None:
        for ranks, held in (([1], {1}), ([3], {1, 3}), ([1], {1, 3}), ([0, 2], None)):
            name = make_checkpoint(store.root, tp=4, ranks=ranks).name
            assert store.names() == [name]
            assert ranks_held(store.path(name)) == held
            deep_verify(store, name)

    @pytest.mark.parametrize("fault", ["missing", "extra", "short"])
    def test_a_commit_refuses_what_the_manifest_does_not_say(
        self, store: DirectoryStore, fault: str
    ) -> None:
        with store.stage("tiny") as staged:
            manifest = fill(staged, make_key())
            file = staged.path / manifest.files[0].path
            if fault == "missing":
                file.unlink()
            elif fault == "short":
                os.truncate(file, 5)
            else:
                staged.write_file("templates/more.txt", b"more")
            with pytest.raises(StagingError) as caught:
                staged.commit(manifest)
        assert (file.name if fault != "extra" else "more.txt") in str(caught.value)
        assert store.names() == []
        assert left_over(store) == []

    def test_what_is_not_there_is_not_found(self, store: DirectoryStore) -> None:
        name = make_checkpoint(store.root).name
        with pytest.raises(NotFoundError):
            store.read_manifest("nothing")
        with pytest.raises(NotFoundError):
            store.open(name, "nothing")

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", ".hidden", "a/../b", "a//b", ""])
    def test_no_path_leaves_the_checkpoint(self, store: DirectoryStore, path: str) -> None:
        name = make_checkpoint(store.root).name
        with pytest.raises(ManifestError):
            store.open(name, path)
        with store.stage("tiny") as staged, pytest.raises((ManifestError, StagingError)):
            staged.create(path if path != ".hidden" else ".hidden/x")

    def test_a_copy_of_some_ranks_is_complete_for_them(
        self, store: DirectoryStore, other: DirectoryStore
    ) -> None:
        manifest = make_checkpoint(store.root)
        with other.stage(manifest.name) as staged:
            entries = manifest.files_for([0])
            transfer.copy(store, manifest.name, manifest, entries, staged)
            staged.commit(manifest, [0])
        deep_verify(other, manifest.name)
        assert ranks_held(other.path(manifest.name)) == {0}

    def test_an_interrupted_copy_is_gone_on_with_by_the_next(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root / "elsewhere")
        elsewhere = DirectoryStore(store.root / "elsewhere")
        entry = manifest.files[-1]
        half = entry.size // 2

        with (
            contextlib.suppress(Interrupted),
            store.stage(manifest.name, manifest.content) as staged,
        ):
            (bytes_of,) = elsewhere.read(manifest.name, entry)
            with contextlib.suppress(StagingError):
                staged.write(entry, [bytes_of[:half]])
            raise Interrupted(15)
        with store.stage(manifest.name, manifest.content) as staged:
            assert sum(map(len, staged.held(entry))) == staged.held_bytes == half
            staged.disown()
        with store.stage(manifest.name, manifest.content) as staged:
            transfer.copy(elsewhere, manifest.name, manifest, manifest.files, staged)
            staged.commit(manifest)
        deep_verify(store, manifest.name)
        assert left_over(store) == []

    def test_a_retired_name_is_gone_and_its_readers_go_on(self, store: DirectoryStore) -> None:
        manifest = make_checkpoint(store.root)
        reader = store.open(manifest.name, "index.json")
        store.retire(manifest.name)
        store.retire(manifest.name)
        assert store.names() == []
        assert os.pread(reader, 1 << 20, 0)
        os.close(reader)
