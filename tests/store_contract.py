"""What every store must do, whatever it lies on: subclass, and give `store`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from checkpoints import TENSORS, Tensor, make_checkpoint

from entrypoint.checkpoint.digest import digest_bytes, digest_file
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.finding import Complete, Damaged
from entrypoint.checkpoint.inspect import ranks_held
from entrypoint.checkpoint.manifest import Manifest, decode
from entrypoint.errors import (
    DamagedError,
    Interrupted,
    ManifestError,
    NotFoundError,
    StagingError,
)
from entrypoint.state.memory import Memory
from entrypoint.store import transfer
from entrypoint.store.base import CheckpointStaging, CheckpointStore
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import Wanted, find_by_name, look
from entrypoint.store.objects import PUBLISHED, ObjectStore
from entrypoint.store.publish import CommitResult


def deep_verify(store: DirectoryStore, name: str) -> Manifest:
    """Read every byte of a listed checkpoint; it must be just what its manifest says."""
    manifest = decode(store.read_manifest(name))
    assert manifest.name == name
    directory = store.path(name)
    held = ranks_held(directory)
    entries = manifest.files_for(manifest.layout.ranks if held is None else held)
    for entry in entries:
        assert (directory / entry.path).stat().st_size == entry.size, entry.path
        assert digest_file(directory / entry.path) == entry.blake3, entry.path
    found = {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}
    beside = {"manifest.json"} | (set() if held is None else {"have.json"})
    assert found == {entry.path for entry in entries} | beside
    return manifest


def left_over(store: DirectoryStore) -> list[str]:
    """Return what lies in staging."""
    staging = store.root / ".staging"
    return sorted(os.listdir(staging)) if staging.exists() else []


class Made:
    """Checkpoints as saves make them, each in a directory store of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def checkpoint(self, seed: int = 0, tensors: Sequence[Tensor] = TENSORS) -> Manifest:
        """Make one, with tensors that `seed` decides."""
        return make_checkpoint(self.root / str(seed), seed=seed, tensors=tensors)

    def store_of(self, manifest: Manifest) -> DirectoryStore:
        """Return where it was made."""
        stores = [DirectoryStore(root) for root in self.root.iterdir()]
        return next(s for s in stores if s.read_manifest(manifest.name) == manifest.encode())


def push(made: Made, manifest: Manifest, store: CheckpointStore) -> CommitResult:
    """Copy a checkpoint into `store`, as a push does."""
    with store.stage(manifest.name) as staged:
        copy(made, manifest, manifest.files, staged)
        return staged.commit(manifest)


def copy(
    made: Made, manifest: Manifest, entries: Iterable[FileEntry], staged: CheckpointStaging
) -> None:
    """Copy some files of a checkpoint that was made."""
    transfer.copy(made.store_of(manifest), manifest.name, manifest, entries, staged)


def read_back(store: CheckpointStore, name: str) -> Manifest:
    """Read every byte of a listed checkpoint; it must be just what its manifest says."""
    assert name in store.names()
    manifest = find_by_name(store, name)
    for entry in manifest.files:
        pieces = [bytes(piece) for piece in store.read(name, entry)]
        assert digest_bytes(b"".join(pieces)) == entry.blake3, entry.path
    return manifest


class StoreContract:
    """Behaviours of every store: give `store`, and how to spoil a file of it."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore | Iterator[CheckpointStore]:
        raise NotImplementedError

    @pytest.fixture
    def local(self, tmp_path: Path) -> DirectoryStore:
        """Another store, to copy into."""
        (tmp_path / "local").mkdir()
        return DirectoryStore(tmp_path / "local")

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """A checkpoint that is not in `store` yet."""
        return Made(tmp_path / "made")

    def spoil(self, store: Any, name: str, path: str, data: bytes | None) -> None:
        """Put other bytes where a published file lies, or take it away."""
        raise NotImplementedError

    def left_over(self, store: Any) -> list[str]:
        """Return what is left of pushes that were not committed."""
        raise NotImplementedError

    def reopened(self, store: Any) -> CheckpointStore:
        """Return the store as another process would see it."""
        again: CheckpointStore = store
        return again

    def test_it_begins_empty(self, store: CheckpointStore) -> None:
        assert store.names() == []

    def test_what_is_pushed_is_listed_and_reads_back(
        self, store: CheckpointStore, made: Made
    ) -> None:
        manifest = made.checkpoint()
        result = push(made, manifest, store)
        assert (result.name, result.outcome) == (manifest.name, "committed")
        assert store.names() == [manifest.name]
        assert store.read_manifest(manifest.name) == manifest.encode()
        assert read_back(store, manifest.name) == manifest
        assert transfer.verify(store, manifest) == ()
        assert self.left_over(store) == []

    def test_a_look_finds_it(self, store: CheckpointStore, made: Made, tmp_path: Path) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        wanted = Wanted(manifest.key, lambda _: True, lambda _: None)
        found = look(store, wanted, Memory(tmp_path / "state"))
        assert found == Complete(manifest, store.locate(manifest.name))

    def test_a_push_that_is_not_committed_leaves_nothing(
        self, store: CheckpointStore, made: Made
    ) -> None:
        manifest = made.checkpoint()
        with store.stage(manifest.name) as staged:
            copy(made, manifest, manifest.files, staged)
            assert store.names() == []
        assert store.names() == []
        assert self.left_over(store) == []

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Interrupted])
    def test_a_push_that_breaks_leaves_nothing(
        self, store: CheckpointStore, made: Made, kind: type[BaseException]
    ) -> None:
        manifest = made.checkpoint()

        def breaks() -> Iterator[memoryview]:
            yield memoryview(b"{")
            raise kind(15)

        entry = next(e for e in manifest.files if e.path == "tokenizer.json")
        with pytest.raises(kind), store.stage(manifest.name) as staged:
            staged.write(entry, breaks())
        assert store.names() == []
        assert self.left_over(store) == []

    def test_the_same_checkpoint_is_pushed_once(self, store: CheckpointStore, made: Made) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        assert push(made, manifest, store) == (manifest.name, "existed")
        assert store.names() == [manifest.name]
        assert self.left_over(store) == []

    def test_other_bytes_get_another_generation(self, store: CheckpointStore, made: Made) -> None:
        first, second = made.checkpoint(), made.checkpoint(seed=1)
        assert first.name == second.name
        push(made, first, store)
        assert push(made, second, store) == (f"{first.name}-g2", "committed")
        assert push(made, second, store) == (f"{first.name}-g2", "existed")
        assert read_back(store, first.name) == first
        assert read_back(store, f"{first.name}-g2") == second.renamed(f"{first.name}-g2")

    @pytest.mark.parametrize("data", [None, b"short"])
    def test_damage_is_seen_and_the_same_checkpoint_replaces_it(
        self, store: CheckpointStore, made: Made, tmp_path: Path, data: bytes | None
    ) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        self.spoil(store, manifest.name, manifest.files[0].path, data)
        again = self.reopened(store)
        finding = again.check(manifest, Memory(tmp_path / "state"), manifest.layout.ranks)
        assert isinstance(finding, Damaged)
        assert manifest.files[0].path in finding.discrepancies[0]
        assert push(made, manifest, again) == (manifest.name, "committed")
        assert read_back(self.reopened(store), manifest.name) == manifest

    @pytest.mark.parametrize("fault", ["missing", "extra"])
    def test_a_push_is_what_its_manifest_says_or_nothing(
        self, store: CheckpointStore, made: Made, fault: str
    ) -> None:
        manifest = made.checkpoint()
        entry = manifest.files[0]
        with store.stage(manifest.name) as staged:
            copy(made, manifest, manifest.files[1:], staged)
            if fault == "extra":
                copy(made, manifest, [entry], staged)
                staged.write(entry._replace(path="more.txt", size=4), [memoryview(b"more")])
            with pytest.raises(StagingError) as caught:
                staged.commit(manifest)
        assert ("more.txt" if fault == "extra" else entry.path) in str(caught.value)
        assert store.names() == []
        assert self.left_over(store) == []

    @pytest.mark.parametrize("data", [b"", b"short", b"x" * 10_000])
    def test_a_file_of_another_size_is_not_taken(
        self, store: CheckpointStore, made: Made, data: bytes
    ) -> None:
        manifest = made.checkpoint()
        with store.stage(manifest.name) as staged, pytest.raises(StagingError, match="expected"):
            staged.write(manifest.files[0], [memoryview(data)])
        assert self.left_over(store) == []

    def test_what_was_never_there_is_not_found(self, store: CheckpointStore, made: Made) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        with pytest.raises(NotFoundError):
            store.read_manifest("nothing")
        with pytest.raises(NotFoundError):
            list(store.read(manifest.name, manifest.files[0]._replace(path="nothing")))
        with pytest.raises(NotFoundError):
            find_by_name(store, "nothing")

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", ".hidden/x", "a/../b", "a//b", ""])
    def test_no_path_leads_out(self, store: CheckpointStore, made: Made, path: str) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        entry = manifest.files[0]._replace(path=path)
        with pytest.raises(ManifestError):
            list(store.read(manifest.name, entry))
        with pytest.raises(ManifestError):
            store.read_manifest(path)
        with store.stage("tiny") as staged, pytest.raises(ManifestError):
            staged.write(entry, [memoryview(b"")])
        with pytest.raises((ManifestError, StagingError)):
            store.stage(path)

    def test_names_of_files_may_be_odd_and_files_empty(
        self, store: CheckpointStore, made: Made, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        odd = {"a b/ü~x#y%20z+*?[]{}&=;'.txt": b"odd", "empty": b""}
        monkeypatch.setattr(checkpoints, "MODEL_FILES", {**checkpoints.MODEL_FILES, **odd})
        manifest = made.checkpoint()
        push(made, manifest, store)
        assert {entry.path for entry in read_back(store, manifest.name).files} >= odd.keys()

    def test_what_is_pushed_can_be_copied(
        self, store: CheckpointStore, made: Made, local: DirectoryStore
    ) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        told: list[int] = []
        with local.stage(manifest.name) as staged:
            transfer.copy(store, manifest.name, manifest, manifest.files, staged, told.append)
            assert staged.commit(manifest).outcome == "committed"
        assert deep_verify(local, manifest.name) == manifest
        assert sum(told) == manifest.size

    @pytest.mark.parametrize("change", ["flipped", "truncated", "longer", "gone"])
    def test_a_copy_of_other_bytes_is_refused(
        self, store: CheckpointStore, made: Made, local: DirectoryStore, change: str
    ) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        entry = manifest.files[0]
        data = b"".join(map(bytes, store.read(manifest.name, entry)))
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        new = {"flipped": flipped, "truncated": data[:-1], "longer": data + b"1", "gone": None}
        self.spoil(store, manifest.name, entry.path, new[change])
        again = self.reopened(store)
        assert entry.path in transfer.verify(again, manifest)[0]
        with (
            local.stage(manifest.name) as staged,
            pytest.raises((DamagedError, NotFoundError), match=entry.path),
        ):
            transfer.copy(again, manifest.name, manifest, manifest.files, staged)
        assert local.names() == []
        assert left_over(local) == []

    def test_a_flipped_bit_is_not_pushed(self, store: CheckpointStore, made: Made) -> None:
        manifest = made.checkpoint()
        shard = made.store_of(manifest).path(manifest.name) / manifest.files[0].path
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        with store.stage(manifest.name) as staged, pytest.raises(DamagedError, match="BLAKE3"):
            copy(made, manifest, manifest.files, staged)
        assert store.names() == []
        assert self.left_over(store) == []

    def test_what_is_retired_is_not_listed_and_who_reads_it_goes_on(
        self, store: CheckpointStore, made: Made
    ) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        with contextlib.closing(store.read(manifest.name, manifest.files[0])) as reading:
            data = bytes(next(reading))
            store.retire(manifest.name)
            store.retire(manifest.name)
            assert store.names() == []
            data += b"".join(map(bytes, reading))
        assert digest_bytes(data) == manifest.files[0].blake3

    def test_a_retired_name_can_be_pushed_again(self, store: CheckpointStore, made: Made) -> None:
        manifest = made.checkpoint()
        push(made, manifest, store)
        store.retire(manifest.name)
        assert push(made, manifest, store) == (manifest.name, "committed")
        assert read_back(store, manifest.name) == manifest


class ObjectContract(StoreContract):
    """How object stores are spoiled and looked through."""

    def spoil(self, store: ObjectStore, name: str, path: str, data: bytes | None) -> None:
        key = f"{store.find(name).published.files}/{path}"
        if data is None:
            store.writes.delete(key)
        else:
            store.writes.put(key, data)

    def left_over(self, store: ObjectStore) -> list[str]:
        return unnamed(store)

    def reopened(self, store: ObjectStore) -> ObjectStore:
        return ObjectStore(store.where, store._connect)


def unnamed(store: ObjectStore) -> list[str]:
    """Return every object that is no part of a published checkpoint."""
    named = [store.find(name).published.files for name in store.names()]
    paths = [stored.path for stored in store.list("")]
    return sorted(path for path in paths if not path.startswith((PUBLISHED, *named)))
