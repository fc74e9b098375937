"""Object stores, on the client's own store in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints import make_key
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import LocalStore, MemoryStore
from store_contract import Made, ObjectContract, copy, push, read_back, unnamed

from entrypoint.checkpoint.finding import Complete, Foreign, Unreachable
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import Interrupted, ManifestError, StagingError, StoreError
from entrypoint.state.memory import Memory
from entrypoint.store import objects, published, upload
from entrypoint.store.bucket import ASKING, Patience
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.leftovers import leftovers, sweep
from entrypoint.store.look import Bounds, Wanted, look
from entrypoint.store.objects import PUBLISHED, ObjectStore
from entrypoint.store.published import Published

NOTHING = f"shardboot-{'0' * 16}"
"""A push's prefix that holds no file."""


class Asked:
    """The client for small questions, in front of a store in memory; tests change what it does."""

    def __init__(self, memory: MemoryStore) -> None:
        self.memory = memory
        self.gets: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def get(self, path: str) -> Any:
        self.gets.append(path)
        return self.memory.get(path)


@pytest.fixture
def asked() -> Asked:
    return Asked(MemoryStore())


def over(asked: Asked) -> ObjectStore:
    def connect(patience: Patience) -> Any:
        return asked if patience is ASKING else asked.memory

    return ObjectStore("memory://bucket", connect)


@pytest.fixture
def store(asked: Asked) -> ObjectStore:
    return over(asked)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made")


class TestInMemory(ObjectContract):
    @pytest.fixture
    def store(self, asked: Asked) -> ObjectStore:
        return over(asked)


def test_files_of_many_parts_and_requests_come_back_as_they_went(
    store: ObjectStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "REQUEST_BYTES", 700)
    monkeypatch.setattr(objects, "CHUNK_BYTES", 100)
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    monkeypatch.setattr("entrypoint.store.pieces.PIECE_BYTES", 300)
    manifest = made.checkpoint(tensors=[("weight", "U8", (50_000,), 50_000)])
    push(made, manifest, store)
    assert read_back(store, manifest.name) == manifest


def test_the_newest_is_listed_first(store: ObjectStore, made: Made) -> None:
    manifest = made.checkpoint()
    names = ["m", "a", "z"]
    for name in names:
        data = Published(f"{name}/{NOTHING}", manifest.renamed(name).encode()).encode()
        store.asks.put(f"{PUBLISHED}/{name}", data)
    assert store.names() == ["z", "a", "m"]


@pytest.mark.parametrize("name", [".hidden", "a/b", "x\\y"])
def test_what_cannot_be_a_name_is_not_listed(store: ObjectStore, name: str) -> None:
    store.asks.put(f"{PUBLISHED}/{name}", b"anything")
    assert store.names() == []


def test_what_is_too_large_for_a_manifest_is_not_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "MAX_BYTES", 100)
    store.asks.put(f"{PUBLISHED}/large", b"{" * 101)
    with pytest.raises(ManifestError, match="at most 100 bytes, found 101"):
        store.read_manifest("large")


def test_a_prefix_with_too_much_in_it_is_said(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_FILES", 3)
    for number in range(4):
        store.asks.put(f"{PUBLISHED}/{number}", b"")
    with pytest.raises(StoreError, match="no end after 4 objects"):
        store.names()


def test_a_listing_that_takes_too_long_is_given_up(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LISTING_SECONDS", 0)
    store.asks.put(f"{PUBLISHED}/name", b"")
    with pytest.raises(StoreError, match="no end after 1 objects"):
        store.names()


def racing(pushers: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once; they meet before each commits."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda p=p: results.append(p())) for p in pushers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meeting(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let `count` pushers all see a free name before any of them takes it."""
    barrier = threading.Barrier(count)
    real = upload.Upload._standing

    def standing(self: upload.Upload, name: str) -> Any:
        found = real(self, name)
        if found is None and not barrier.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(2)
                barrier.abort()
        return found

    monkeypatch.setattr(upload.Upload, "_standing", standing)


def test_of_many_who_push_the_same_one_wins_and_the_others_take_theirs_back(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = made.checkpoint()
    meeting(monkeypatch, 6)
    results = racing([lambda: push(made, manifest, over(asked))] * 6)
    assert sorted(results) == [(manifest.name, "committed")] + [(manifest.name, "existed")] * 5
    assert read_back(over(asked), manifest.name) == manifest
    assert unnamed(over(asked)) == []


def test_of_two_who_push_other_bytes_each_gets_a_name(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [made.checkpoint(seed) for seed in (0, 1)]
    meeting(monkeypatch, 2)
    results = racing([partial(push, made, manifest, over(asked)) for manifest in both])
    name = both[0].name
    assert sorted(results) == [(name, "committed"), (f"{name}-g2", "committed")]
    contents = {read_back(over(asked), result.name).content for result in results}
    assert contents == {manifest.content for manifest in both}
    assert unnamed(over(asked)) == []


def unconditional(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(path: str, data: bytes, **_: Any) -> Any:
        return asked.memory.put(path, data)

    monkeypatch.setattr(asked, "put", put, raising=False)


def test_where_conditions_are_ignored_a_name_is_whole_after_a_race_all_the_same(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconditional(asked, monkeypatch)
    manifest = made.checkpoint()
    meeting(monkeypatch, 4)
    racing([lambda: push(made, manifest, over(asked))] * 4)
    assert read_back(over(asked), manifest.name) == manifest
    # Nobody can tell whether a late put still comes, so the losers' files wait for a sweep.
    assert sweep(over(asked), -1)
    assert unnamed(over(asked)) == []
    assert read_back(over(asked), manifest.name) == manifest


@pytest.mark.parametrize("error", [GenericError("timed out"), AlreadyExistsError("412")])
def test_a_put_that_worked_although_it_says_otherwise_is_seen(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def put(path: str, data: bytes, **_: Any) -> Any:
        asked.memory.put(path, data)
        raise error

    monkeypatch.setattr(asked, "put", put, raising=False)
    manifest = made.checkpoint()
    assert push(made, manifest, over(asked)) == (manifest.name, "committed")
    assert read_back(over(asked), manifest.name) == manifest


def test_files_stay_when_nobody_knows_whether_the_last_put_worked(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[str, bytes]] = []

    def put(path: str, data: bytes, **_: Any) -> Any:
        late.append((path, data))
        raise GenericError("timed out")

    monkeypatch.setattr(asked, "put", put, raising=False)
    manifest = made.checkpoint()
    with pytest.raises(StoreError, match="no answer in time"):
        push(made, manifest, over(asked))
    assert over(asked).names() == []
    asked.memory.put(*late[0])
    assert read_back(over(asked), manifest.name) == manifest


def test_a_push_that_a_signal_ends_asks_the_store_for_nothing_more(
    asked: Asked, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = over(asked), made.checkpoint()

    def ask(*_: object, **__: object) -> Any:
        pytest.fail("somebody waits for the end, and the store may not answer")

    def stopped() -> None:
        with store.stage(manifest.name) as staged:
            copy(made, manifest, manifest.files, staged)
            monkeypatch.setattr(asked, "list", ask, raising=False)
            monkeypatch.setattr(asked, "delete", ask, raising=False)
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        stopped()
    monkeypatch.undo()
    (left,) = sweep(over(asked), -1)
    assert left.startswith(f"{manifest.name}/shardboot-")
    assert unnamed(over(asked)) == []


def test_a_published_name_that_cannot_be_read_keeps_it(store: ObjectStore, made: Made) -> None:
    manifest = made.checkpoint()
    store.asks.put(f"{PUBLISHED}/{manifest.name}", b"not ours")
    assert push(made, manifest, store).name == f"{manifest.name}-g2"


def test_some_ranks_alone_are_not_pushed(store: ObjectStore, made: Made) -> None:
    manifest = made.checkpoint()
    with store.stage(manifest.name) as staged, pytest.raises(StagingError, match="all ranks"):
        staged.commit(manifest, [0])


def test_only_what_a_dead_push_left_is_swept_and_only_when_it_is_old(
    store: ObjectStore, made: Made
) -> None:
    manifest = made.checkpoint()
    push(made, manifest, store)
    dead = f"{manifest.name}/{NOTHING}"
    for path in (f"{dead}/index.json", "other/data.bin", f"{manifest.name}/mine/notes.txt"):
        store.writes.put(path, b"1")
    assert leftovers(store, 3600) == []
    assert leftovers(store, -1) == [dead]
    assert sweep(store, -1) == [dead]
    assert leftovers(store, -1) == []
    assert unnamed(store) == ["other/data.bin", f"{manifest.name}/mine/notes.txt"]
    assert read_back(store, manifest.name) == manifest


def test_nothing_is_swept_while_a_name_does_not_say_where_its_files_lie(store: ObjectStore) -> None:
    store.writes.put(f"tiny/{NOTHING}/index.json", b"1")
    store.asks.put(f"{PUBLISHED}/tiny", b"not ours")
    with pytest.raises(ManifestError):
        sweep(store, -1)
    assert [stored.path for stored in store.list("tiny")] == [f"tiny/{NOTHING}/index.json"]


def crowded(store: ObjectStore, made: Made, wanted: Manifest, count: int) -> None:
    """Publish many others, each newer than the wanted one."""
    push(made, wanted, store)
    for number in range(count):
        key = make_key(tp=2, dtype="float16", model=f"{number:064x}")
        other = f"other-tp2-fp16-vllm0.32.0-{number:012x}"
        data = Published(f"{other}/{NOTHING}", wanted._replace(name=other, key=key).encode())
        store.asks.put(f"{PUBLISHED}/{other}", data.encode())


@pytest.mark.parametrize("known", ["digits", "model", "nothing but the key"])
def test_a_look_at_a_big_bucket_asks_for_the_right_name_first(
    asked: Asked, made: Made, tmp_path: Path, known: str
) -> None:
    wanted = made.checkpoint()
    crowded(over(asked), made, wanted, 200)
    asked.gets.clear()
    likely = wanted.key.digest[:12] if known == "digits" else None
    model = "tiny" if known == "model" else "elsewhere"
    what = Wanted(wanted.key, lambda _: True, lambda _: None, likely=likely, model=model)
    found = look(over(asked), what, Memory(tmp_path / "state"), Bounds(64, 10))
    assert isinstance(found, Complete)
    assert asked.gets == [f"{PUBLISHED}/{wanted.name}"]


def test_a_look_for_what_is_not_there_asks_for_few_and_tells_the_nearest(
    asked: Asked, made: Made, tmp_path: Path
) -> None:
    crowded(over(asked), made, made.checkpoint(), 200)
    asked.gets.clear()
    what = Wanted(make_key(tp=4), lambda _: True, lambda _: None)
    found = look(over(asked), what, Memory(tmp_path / "state"), Bounds(20, 10))
    assert isinstance(found, Foreign)
    assert len(asked.gets) == 20


def test_a_look_at_a_slow_store_ends_in_time(
    asked: Asked, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded(over(asked), made, made.checkpoint(), 20)
    real = asked.get

    def slow(path: str) -> Any:
        time.sleep(0.05)
        return real(path)

    monkeypatch.setattr(asked, "get", slow)
    what = Wanted(make_key(tp=4), lambda _: True, lambda _: None)
    asked.gets.clear()
    found = look(over(asked), what, Memory(tmp_path / "state"), Bounds(64, 0.2))
    assert isinstance(found, Unreachable)
    # Of the 20 that it would ask for, those that there is time for.
    assert len(asked.gets) <= 5


def test_a_bucket_that_is_mounted_as_well_keeps_what_both_push(made: Made, tmp_path: Path) -> None:
    mount = DirectoryStore(tmp_path / "bucket")
    mount.root.mkdir()
    bucket = ObjectStore("file://bucket", lambda _: cast("Any", LocalStore(mount.root)))
    manifest = made.checkpoint()
    assert push(made, manifest, bucket) == (manifest.name, "committed")
    assert mount.names() == []
    (name, _) = push(made, manifest, mount)
    assert mount.names() == [name]
    assert bucket.names() == [manifest.name]
    assert leftovers(bucket, -1) == []
    assert read_back(mount, name).content == read_back(bucket, manifest.name).content
