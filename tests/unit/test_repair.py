"""Repairing a damaged checkpoint: what is copied, what stays, and what a server notices of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from checkpoints import Tensor, make_checkpoint, proof_of
from store_contract import deep_verify, left_over

from entrypoint.checkpoint.entry import INDEX, MANIFEST, FileEntry
from entrypoint.checkpoint.finding import Complete, Damaged
from entrypoint.checkpoint.inspect import verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import resolve
from entrypoint.errors import DamagedError, SpaceError
from entrypoint.log import Log
from entrypoint.sidecar.node import Node
from entrypoint.sidecar.repair import Repair
from entrypoint.store import lock
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import remember_look

BIG: tuple[Tensor, ...] = tuple((f"layers.{n}.weight", "U8", (1 << 16,), 1 << 16) for n in range(6))
BAD = "model-rank-1-part-0.safetensors"


class Counting(DirectoryStore):
    """Counts what is read of it, by file."""

    read_of: dict[str, int]

    def read(self, name: str, entry: FileEntry, start: int = 0) -> Generator[memoryview]:
        for piece in super().read(name, entry, start):
            self.read_of[entry.path] = self.read_of.get(entry.path, 0) + len(piece)
            yield piece


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    make_checkpoint(tmp_path / "shared", tensors=BIG)
    return make_checkpoint(tmp_path / "local", tensors=BIG)


@pytest.fixture
def node(tmp_path: Path, manifest: Manifest) -> Node:
    flags = {name: str(tmp_path / name) for name in ("local", "state")}
    settings = {"local_dir": flags["local"], "state_dir": flags["state"], "reserve_bytes": "0"}
    made = Node(resolve(settings | {"shared": str(tmp_path / "shared")}, {}), {}, Log("sidecar"))
    made.shared = Counting(tmp_path / "shared")
    made.shared.read_of = {}
    return made


@pytest.fixture
def here(node: Node, manifest: Manifest) -> Path:
    return node.local.path(manifest.name)


def flip(path: Path, offset: int = -1) -> None:
    """Flip a bit of a file in place, as a disk does: nothing else of it moves."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def found_by_scrub(node: Node, manifest: Manifest) -> None:
    directory = node.local.path(manifest.name)
    wrong = verify_deep(directory, manifest, node.local.ranks(manifest))
    remember_look(directory, manifest, wrong, node.boot.memory)


def repair(node: Node, manifest: Manifest) -> dict[str, int]:
    """Let a sidecar find and repair it; return what was read of the shared store, by file."""
    found_by_scrub(node, manifest)
    node.look()
    node.look_far()
    list(Repair(node).run())
    assert isinstance(node.shared, Counting)
    return node.shared.read_of


def is_whole(node: Node, manifest: Manifest) -> bool:
    deep_verify(node.local, manifest.name)
    ranks = node.local.ranks(manifest)
    return isinstance(node.local.check(manifest, node.boot.memory, ranks), Complete)


def test_of_a_damaged_checkpoint_only_the_bad_file_is_copied(
    node: Node, manifest: Manifest, here: Path
) -> None:
    flip(here / BAD)
    sizes = {entry.path: entry.size for entry in manifest.files}
    inodes = {path: (here / path).stat().st_ino for path in sizes}
    assert repair(node, manifest) == {BAD: sizes[BAD]}
    assert is_whole(node, manifest)
    assert node.local.names() == [manifest.name]
    assert left_over(node.local) == []
    changed = {path for path, inode in inodes.items() if (here / path).stat().st_ino != inode}
    assert changed == {BAD}


def test_from_the_one_that_was_published_with_its_proof_too(
    node: Node, manifest: Manifest, here: Path
) -> None:
    assert node.shared is not None
    proved = manifest._replace(proof=proof_of(manifest))
    Path(node.shared.locate(manifest.name), MANIFEST).write_bytes(proved.encode())
    before = (here / MANIFEST).stat()
    flip(here / BAD)
    assert set(repair(node, manifest)) == {BAD}
    assert is_whole(node, manifest)
    # A server that runs from it has locked this very file.
    assert (here / MANIFEST).stat().st_ino == before.st_ino
    assert node.local.names() == [manifest.name]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", [BAD, INDEX, "config.json", "templates/chat.jinja"])
def test_whatever_file_is_damaged_however_it_alone_is_copied(
    node: Node, manifest: Manifest, here: Path, file: str, damage: Callable[[Path], object]
) -> None:
    damage(here / file)
    assert set(repair(node, manifest)) == {file}
    assert is_whole(node, manifest)


def test_a_stray_shard_goes_and_nothing_is_copied(
    node: Node, manifest: Manifest, here: Path
) -> None:
    (here / "model-rank-7-part-0.safetensors").touch()
    assert repair(node, manifest) == {}
    assert is_whole(node, manifest)


def test_bits_that_flip_anywhere_are_all_repaired(
    node: Node, manifest: Manifest, here: Path
) -> None:
    seed = random.randrange(1 << 32)  # noqa: S311 - places, not secrets
    print(f"seed {seed}")
    places = random.Random(seed)  # noqa: S311 - places, not secrets
    for entry in places.sample(manifest.files, 5):
        flip(here / entry.path, places.randrange(entry.size))
        assert set(repair(node, manifest)) <= {entry.path}
        assert is_whole(node, manifest)
        node.boot.memory.remember("repaired", manifest.content, 1.0)
        assert isinstance(node.shared, Counting)
        node.shared.read_of.clear()


def test_who_serves_it_keeps_lock_and_files_and_none_is_changed(
    node: Node, manifest: Manifest, here: Path
) -> None:
    flip(here / BAD)
    damaged = (here / BAD).read_bytes()
    held = lock.hold_manifest(here, manifest.digest)
    with (here / BAD).open("rb") as open_there:
        repair(node, manifest)
        assert is_whole(node, manifest)
        assert open_there.read() == damaged
        assert (here / BAD).read_bytes() != damaged
        assert not lock.is_free(here)
    os.close(held)
    assert lock.is_free(here)


def test_where_files_cannot_be_linked_all_are_copied_but_none_under_a_server(
    node: Node, manifest: Manifest, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    flip(here / BAD)
    held = lock.hold_manifest(here, manifest.digest)
    assert repair(node, manifest) == {}
    os.close(held)
    assert sum(repair(node, manifest).values()) == manifest.size
    assert is_whole(node, manifest)


def test_what_is_damaged_in_both_places_stays_as_it_is_and_is_not_read_again(
    node: Node, manifest: Manifest, here: Path, tmp_path: Path
) -> None:
    flip(here / BAD)
    flip(tmp_path / "shared" / manifest.name / BAD)
    found_by_scrub(node, manifest)
    node.look()
    node.look_far()
    job = Repair(node)
    with pytest.raises(DamagedError, match=f"shared.*{BAD}"):
        list(job.run())
    job.later.forget_all()
    assert list(job.run()) == []
    assert isinstance(node.local.check(manifest, node.boot.memory, ()), Damaged)
    assert left_over(node.local) == []
    assert node.local.names() == [manifest.name]


def test_a_repair_takes_no_more_room_than_what_is_bad(
    node: Node, manifest: Manifest, here: Path
) -> None:
    flip(here / BAD)
    asked: list[int] = []

    def short(_: object, needed: int, __: object) -> None:
        asked.append(needed)
        raise SpaceError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entrypoint.store.collect.space.shortage", short)
        with pytest.raises(SpaceError):
            repair(node, manifest)
    assert asked[0] < 2 * (here / BAD).stat().st_size
    assert set(repair(node, manifest)) == {BAD}
    assert is_whole(node, manifest)
