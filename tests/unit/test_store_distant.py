"""A store on a file system of others: looked at as any other, and not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_key
from directory_contract import DirectoryContract

from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Unreachable
from entrypoint.errors import ManifestError, NotFoundError, StoreError
from entrypoint.state.memory import Memory
from entrypoint.store import directory, distant, look
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.distant import DistantStore
from entrypoint.store.look import Wanted


@pytest.fixture
def store(tmp_path: Path) -> DistantStore:
    (tmp_path / "store").mkdir()
    return DistantStore(tmp_path / "store")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "CHECK_SECONDS"):
        monkeypatch.setattr(distant, name, 0.2)


class TestLookedAtInChildren(DirectoryContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore:
        (tmp_path / "store").mkdir()
        return DistantStore(tmp_path / "store")


def hang(*_: Any, **__: Any) -> Any:
    time.sleep(1000)


HANGS: dict[str, tuple[Any, str]] = {
    "names": (directory, "_written"),
    "a manifest": (directory, "read_bounded"),
    "its files": (look, "examine"),
}


@pytest.mark.parametrize("where", HANGS)
def test_a_look_at_a_store_that_falls_silent_ends_as_if_it_were_not_there(
    store: DistantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None, where: str
) -> None:
    for each in range(30):
        make_checkpoint(store.root, name=f"n{each}")
    monkeypatch.setattr(*HANGS[where], hang)
    wanted = Wanted(make_key(), lambda _: True, lambda _: None)
    started = time.monotonic()
    found = look.look(store, wanted, Memory(tmp_path))
    assert isinstance(found, Unreachable)
    assert found.error == f"{store.root} did not answer within 0 s"
    # Not once for each of them.
    assert time.monotonic() - started < 5


def test_a_store_of_many_names_may_take_its_time(
    store: DistantStore, monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    for each in range(10):
        make_checkpoint(store.root, name=f"n{each}")
    written: Callable[[Path], int | None] = directory._written

    def slow(path: Path) -> int | None:
        time.sleep(0.05)
        return written(path)

    monkeypatch.setattr(directory, "_written", slow)
    assert len(store.names()) == 10


def test_it_tells_what_it_finds_as_any_directory_does(store: DistantStore, tmp_path: Path) -> None:
    manifest, memory = make_checkpoint(store.root), Memory(tmp_path / "memory")
    plain = DirectoryStore(store.root)
    for ranks in (manifest.layout.ranks, [0, 1, 99]):
        assert store.check(manifest, memory, ranks) == plain.check(manifest, memory, ranks)
    assert isinstance(store.check(manifest, memory, manifest.layout.ranks), Complete)
    assert isinstance(store.check(manifest, memory, [99]), Absent)
    (store.path(manifest.name) / "config.json").unlink()
    found = store.check(manifest, memory, manifest.layout.ranks)
    assert isinstance(found, Damaged)
    assert found == plain.check(manifest, memory, manifest.layout.ranks)
    for name in ("none", "../up"):
        with pytest.raises((NotFoundError, ManifestError)) as wrong:
            plain.read_manifest(name)
        with pytest.raises(wrong.type, match=str(wrong.value)):
            store.read_manifest(name)


def test_where_no_child_is_to_be_had_it_cannot_be_looked_at(
    store: DistantStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(distant, "while_alive", none)
    with pytest.raises(StoreError, match="temporarily unavailable"):
        store.names()
