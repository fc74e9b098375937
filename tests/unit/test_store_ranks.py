"""A node has the files of its own ranks: looked for, copied, completed, gone on with by them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import make_checkpoint, proof_of
from store_contract import deep_verify, left_over

from entrypoint import proving, publishing, steps
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.entry import HAVE
from entrypoint.checkpoint.finding import (
    Absent,
    Complete,
    Damaged,
    Finding,
    Foreign,
    Rejected,
)
from entrypoint.checkpoint.inspect import ranks_held
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import resolve
from entrypoint.errors import Interrupted, NotFoundError, StoreError
from entrypoint.log import Log
from entrypoint.plan import Action, Situation
from entrypoint.state.memory import Memory
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address
from entrypoint.store import lock, publish, transfer, trash, writeback
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import Wanted, look, remember_look

ABSENT = Absent()


class Counting(DirectoryStore):
    """Says which files were read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.files: list[str] = []

    def read(self, name: str, entry: Any, start: int = 0) -> Any:
        self.files.append(entry.path)
        return super().read(name, entry, start)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Return a checkpoint of four ranks, whole in the shared store."""
    return make_checkpoint(tmp_path / "shared", tp=4)


@pytest.fixture
def shared(tmp_path: Path, manifest: Manifest) -> Counting:
    return Counting(tmp_path / "shared")


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "local").mkdir()
    return DirectoryStore(tmp_path / "local", 0o750, 0o640)


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    environ = {"SHARDBOOT_STATE_DIR": str(tmp_path / "state"), "SHARDBOOT_RESERVE_BYTES": "0"}
    settings = resolve({}, environ | {"SHARDBOOT_LOCAL_DIR": str(tmp_path / "local")})
    return Boot(settings, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))


def assessed(
    shared: DirectoryStore, local: DirectoryStore, ranks: Collection[int], here: Finding
) -> Assessment:
    found = SimpleNamespace(
        resolution=SimpleNamespace(ranks=tuple(ranks), nnodes=1, family={}),
        local_store=local,
        shared_store=shared,
        situation=Situation(local=here, shared=Absent()),
    )
    return cast("Assessment", found)


def copy(
    boot: Boot,
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    ranks: Collection[int],
    here: Finding = ABSENT,
) -> Manifest:
    """Copy as the boot of a node with `ranks` does."""
    action = Action("copy", "shared.hit", "", manifest=manifest)
    return steps.copy_here(boot, assessed(shared, local, ranks, here), action)


def find(store: DirectoryStore, manifest: Manifest, ranks: Collection[int], state: Path) -> Finding:
    """Look as a node with `ranks` does."""
    wanted = Wanted(manifest.key, lambda _: True, lambda _: None, ranks=ranks)
    return look(store, wanted, Memory(state))


def shards(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.safetensors")}


def test_of_the_shards_only_those_of_the_nodes_own_ranks_are_copied(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest
) -> None:
    copy(boot, shared, local, manifest, [2, 3])
    deep_verify(local, manifest.name)
    assert ranks_held(local.path(manifest.name)) == {2, 3}
    assert sorted(shared.files) == sorted(e.path for e in manifest.files_for([2, 3]))
    assert manifest.size_for([2, 3]) < manifest.size


def test_it_is_complete_for_these_and_absent_for_others_in_words(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    copy(boot, shared, local, manifest, [2, 3])
    for ranks in ([2, 3], [3]):
        found = find(local, manifest, ranks, tmp_path / "state")
        assert isinstance(found, Complete)
        assert found.ranks == "ranks 2-3 of 4"
    for others, lacks in (([1, 2], "rank 1 of 4"), ([0, 1, 2, 3], "ranks 0-1 of 4")):
        found = find(local, manifest, others, tmp_path / "state")
        assert found == Absent(f"{manifest.name} holds ranks 2-3 of 4, and lacks {lacks}")
    whole = find(shared, manifest, [0], tmp_path / "state")
    assert isinstance(whole, Complete)
    assert whole.ranks == ""


def test_one_of_other_ranks_comes_nearer_than_a_foreign_one(
    local: DirectoryStore, tmp_path: Path
) -> None:
    manifest = make_checkpoint(local.root, tp=4, ranks=[0])
    make_checkpoint(local.root, tp=2)
    assert isinstance(find(local, manifest, [1], tmp_path / "state"), Absent)
    other = manifest._replace(key=manifest.key._replace(tp=8))
    assert isinstance(find(local, other, [1], tmp_path / "state"), Foreign)


@pytest.mark.parametrize("said", [b"{}", b"[]", b"\xff", b'{"ranks": "all"}', b'{"ranks": [9]}'])
def test_a_have_json_that_names_no_rank_is_damage(
    local: DirectoryStore, tmp_path: Path, said: bytes
) -> None:
    manifest = make_checkpoint(local.root, ranks=[0])
    (local.path(manifest.name) / HAVE).write_bytes(said)
    assert find(local, manifest, [0], tmp_path / "state") == Damaged(
        manifest.name, (f"{HAVE}: names no rank",)
    )


def test_a_node_that_needs_other_ranks_completes_the_same_checkpoint(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    held: set[int] = set()
    for ranks in ([1], [3], [2, 3], [0, 1, 2, 3]):
        copy(boot, shared, local, manifest, ranks)
        held |= {*ranks}
        assert local.names() == [manifest.name]
        assert {*local.ranks(manifest)} == held
        deep_verify(local, manifest.name)
        assert isinstance(find(local, manifest, ranks, tmp_path / "state"), Complete)
    assert not (local.path(manifest.name) / HAVE).exists()
    weights = [path for path in shared.files if path.endswith(".safetensors")]
    assert len(weights) == len(set(weights))


def test_what_a_server_reads_stays_the_same_files_under_the_same_locks(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest
) -> None:
    copy(boot, shared, local, manifest, [0])
    directory = local.path(manifest.name)
    held = lock.hold_manifest(directory, manifest.digest)
    mine = {name: (directory / name).stat() for name in [*shards(directory), "manifest.json"]}
    copy(boot, shared, local, manifest, [1])
    for name, before in mine.items():
        now = (directory / name).stat()
        assert now.st_ino == before.st_ino
        # What was completed now is young to gc, whenever it was saved.
        assert (now.st_mtime_ns > before.st_mtime_ns) is (name == "manifest.json")
    assert not lock.is_free(directory)
    os.close(held)
    assert lock.is_free(directory)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_while_it_is_completed_its_name_is_never_free_where_the_file_system_can(
    boot: Boot,
    shared: Counting,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    can_exchange: bool,
) -> None:
    """And elsewhere for the time between two renames."""
    copy(boot, shared, local, manifest, [0])
    missing: list[bool] = []
    real = trash.discard

    def look_and_discard(*words: Any) -> None:
        real(*words)
        missing.append(not local.path(manifest.name).exists())

    monkeypatch.setattr(trash, "discard", look_and_discard)
    if not can_exchange:
        monkeypatch.setattr(writeback, "exchange", refuse)
    copy(boot, shared, local, manifest, [1])
    assert missing == [not can_exchange]
    deep_verify(local, manifest.name)
    assert ranks_held(local.path(manifest.name)) == {0, 1}


def refuse(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_signal_between_the_two_renames_puts_back_what_was_there(
    boot: Boot,
    shared: Counting,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy(boot, shared, local, manifest, [0])

    def stop(*_: object) -> bool:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(writeback, "exchange", refuse)
    monkeypatch.setattr(publish, "_rename", stop)
    with pytest.raises(Interrupted):
        copy(boot, shared, local, manifest, [1])
    deep_verify(local, manifest.name)
    assert ranks_held(local.path(manifest.name)) == {0}


def damage_is_known(local: DirectoryStore, manifest: Manifest, state: Path) -> tuple[str, ...]:
    """Let a deep look have found rank 0's file damaged, and return its words."""
    wrong = ("model-rank-0-part-0.safetensors: BLAKE3 is not the one in the manifest",)
    remember_look(local.path(manifest.name), manifest, wrong, Memory(state))
    return wrong


def test_a_damaged_file_of_another_rank_is_damage_and_not_taken_over(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    """What a deep look found must not be forgotten by a link, which changes a file's ctime."""
    copy(boot, shared, local, manifest, [0])
    rotten = local.path(manifest.name) / next(e.path for e in manifest.files if e.rank == 0)
    with rotten.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00" if rotten.read_bytes()[-1] else b"\x01")
    wrong = damage_is_known(local, manifest, tmp_path / "state")
    found = find(local, manifest, [1], tmp_path / "state")
    assert found == Damaged(manifest.name, wrong)
    copy(boot, shared, local, manifest, [1], found)
    deep_verify(local, manifest.name)
    assert ranks_held(local.path(manifest.name)) == {1}


def test_damage_is_not_forgotten_when_another_node_links_the_file(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    copy(boot, shared, local, manifest, [0])
    wrong = damage_is_known(local, manifest, tmp_path / "state")
    # Another state directory knows nothing of it.
    copy(boot, shared, local, manifest, [1])
    assert find(local, manifest, [0], tmp_path / "state") == Damaged(manifest.name, wrong)


def interrupt(local: DirectoryStore, manifest: Manifest, ranks: Collection[int]) -> None:
    """Leave half a copy for `ranks`."""
    entry = next(entry for entry in manifest.files if entry.rank in ranks)
    with (
        contextlib.suppress(StoreError),
        local.stage(manifest.name, manifest.part(ranks)) as staged,
    ):
        staged.write(entry, [memoryview(bytes(entry.size))])
        raise StoreError("gone")


def test_a_copy_that_was_interrupted_is_gone_on_with_for_the_same_ranks_only(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest
) -> None:
    interrupt(local, manifest, [0])
    [left] = left_over(local)
    copy(boot, shared, local, manifest, [1])
    assert left_over(local) == [left]
    copy(boot, shared, local, manifest, [0])
    assert left_over(local) == []
    deep_verify(local, manifest.name)
    assert ranks_held(local.path(manifest.name)) == {0, 1}


def test_one_without_its_proof_is_not_completed_by_the_files_of_the_one_that_has_it(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    far, proved = Counting(tmp_path / "far"), manifest._replace(proof=proof_of(manifest))
    with far.stage(proved.name) as staged:
        transfer.copy(shared, manifest.name, manifest, manifest.files, staged)
        staged.commit(proved)
    copy(boot, shared, local, manifest, [0])
    made = copy(boot, far, local, proved, [0, 1])
    assert made == proved.renamed(f"{manifest.name}-g2")
    assert ranks_held(local.path(made.name)) == {0, 1}
    assert ranks_held(local.path(manifest.name)) == {0}
    assert len(far.files) == len(set(far.files))


def test_room_is_asked_for_what_is_copied(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest
) -> None:
    settings = boot.settings._replace(max_bytes=manifest.size_for([0]))
    copy(boot._replace(settings=settings), shared, local, manifest, [0])
    assert ranks_held(local.path(manifest.name)) == {0}


def test_a_push_of_some_ranks_is_refused_in_one_line(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    copy(boot, shared, local, manifest, [2, 3])
    far = DirectoryStore(tmp_path / "far")
    far.root.mkdir()
    with pytest.raises(NotFoundError, match=r"the local store has ranks 2-3 of 4 only, and a push"):
        publishing.push(boot, assessed(far, local, [2, 3], Absent()), manifest)
    assert os.listdir(far.root) == []


def test_a_proof_of_some_ranks_is_refused_and_rejects_nothing(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest
) -> None:
    copy(boot, shared, local, manifest, [2, 3])
    unproved = Rejected(manifest.name, "unproved", "never proved")
    with pytest.raises(NotFoundError, match=r"the local store has ranks 2-3 of 4 only"):
        proving.prove_here(boot, assessed(shared, local, range(4), unproved))
    assert not (boot.settings.state_dir / "rejections").exists()


def test_without_links_the_last_node_that_came_has_its_ranks(
    boot: Boot,
    shared: Counting,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_permitted(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", not_permitted)
    for ranks in ([0], [1], [1, 3]):
        copy(boot, shared, local, manifest, ranks)
        deep_verify(local, manifest.name)
        assert ranks_held(local.path(manifest.name)) == {*ranks}


def test_of_a_store_that_holds_some_ranks_these_can_be_copied(
    boot: Boot, shared: Counting, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    copy(boot, shared, local, manifest, [1])
    (tmp_path / "third").mkdir()
    third = DirectoryStore(tmp_path / "third")
    with third.stage(manifest.name) as staged:
        transfer.copy(local, manifest.name, manifest, manifest.files_for([1]), staged)
        staged.commit(manifest, [1])
    assert json.loads((third.path(manifest.name) / HAVE).read_text()) == {"ranks": [1]}
    deep_verify(third, manifest.name)
