"""Caches on a shelf beside checkpoints: what is put there, and what is taken from there."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from obstore.store import MemoryStore

from entrypoint.caches import archive, exchange, place
from entrypoint.caches.exchange import Wanted
from entrypoint.caches.label import Label, decode
from entrypoint.caches.shared import collect_shared
from entrypoint.caches.shelf import SHELF, Shelf, shelf_of
from entrypoint.errors import (
    DamagedError,
    KeyMismatchError,
    ManifestError,
    NotFoundError,
    ShardbootError,
    SpaceError,
    StagingError,
)
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.objects import ObjectStore

NAME = "model-tp2-bf16-vllm0.32.0-0123456789ab"
MOST = 1 << 20
WANTED = Wanted(NAME, "0" * 64, f"/checkpoints/{NAME}")
FILES = {
    "vllm/modelinfos/llama.json": b"{}",
    "vllm/torch_compile_cache/aot/rank_0_0/model": b"graph" * 1000,
    "triton/kernel.so": b"\x7fELF",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return filled(tmp_path / "here", FILES)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return place.place_of(tmp_path / "there", NAME)


@pytest.fixture(params=["directory", "bucket"])
def shelf(tmp_path: Path, request: pytest.FixtureRequest) -> Shelf:
    if request.param == "bucket":
        memory: Any = MemoryStore()
        return shelf_of(ObjectStore("memory://bucket", lambda _: memory))
    (tmp_path / "shared").mkdir()
    return shelf_of(DirectoryStore(tmp_path / "shared"))


def filled(state: Path, files: dict[str, bytes]) -> Path:
    where = place.place_of(state, NAME)
    for path, data in files.items():
        (where / path).parent.mkdir(parents=True, exist_ok=True)
        (where / path).write_bytes(data)
    return where


def contents(where: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(where)): path.read_bytes()
        for path in where.rglob("*")
        if path.is_file() and path.name != place.CHECKPOINT
    }


def nothing_stays(there: Path) -> bool:
    root = there.parent
    staging = root / ".staging"
    return not there.exists() and (not staging.exists() or os.listdir(staging) == [])


def test_what_one_node_has_compiled_another_one_gets(here: Path, there: Path, shelf: Shelf) -> None:
    assert "3 files" in exchange.publish(here, WANTED, shelf, MOST)
    assert "3 files" in exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert contents(there) == FILES
    assert (there / place.CHECKPOINT).read_text() == WANTED.path
    assert {path.stat().st_mode & 0o077 for path in (there, *there.rglob("*"))} == {0}
    assert os.listdir(there.parent / ".staging") == []


def test_a_path_that_is_no_utf_8_is_a_path(here: Path, there: Path, shelf: Shelf) -> None:
    wanted = WANTED._replace(path=os.fsdecode(b"/srv/\xff"))
    exchange.publish(here, wanted, shelf, MOST)
    exchange.fetch(there, wanted, shelf, MOST, 0)
    assert (there / place.CHECKPOINT).read_bytes() == b"/srv/\xff"


def test_locks_links_and_what_is_empty_or_half_written_stay_at_home(
    tmp_path: Path, here: Path, there: Path, shelf: Shelf
) -> None:
    filled(tmp_path / "here", {"vllm/a.lock": b"1", "vllm/b.tmp": b"1", "vllm/c": b""})
    (here / "vllm" / "link").symlink_to("/etc/passwd")
    exchange.publish(here, WANTED, shelf, MOST)
    exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert contents(there) == FILES


def test_the_same_caches_are_published_once_and_newer_ones_replace_them(
    tmp_path: Path, here: Path, there: Path, shelf: Shelf
) -> None:
    exchange.publish(here, WANTED, shelf, MOST)
    before = shelf.names().keys()
    assert exchange.publish(here, WANTED, shelf, MOST) == "published already"
    filled(tmp_path / "here", {"vllm/new": b"graph"})
    exchange.publish(here, WANTED, shelf, MOST)
    assert len(shelf.names()) == 2
    assert shelf.names().keys() != before
    exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert contents(there) == FILES | {"vllm/new": b"graph"}


def test_nothing_is_published_where_there_is_nothing_or_too_much(
    tmp_path: Path, here: Path, shelf: Shelf
) -> None:
    empty = place.place_of(tmp_path / "empty", NAME)
    empty.mkdir(parents=True)
    assert exchange.publish(empty, WANTED, shelf, MOST) == "none to publish yet"
    with pytest.raises(SpaceError):
        exchange.publish(here, WANTED, shelf, 100)
    assert shelf.names() == {}


def test_caches_that_are_here_are_never_replaced(
    tmp_path: Path, here: Path, there: Path, shelf: Shelf
) -> None:
    exchange.publish(here, WANTED, shelf, MOST)
    filled(tmp_path / "there", {"vllm/mine": b"mine"})
    with pytest.raises(ShardbootError):
        exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert contents(there) == {"vllm/mine": b"mine"}


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (WANTED._replace(key="1" * 64), "key"),
        (WANTED._replace(path=f"/elsewhere/{NAME}"), "path"),
    ],
)
def test_what_was_compiled_for_something_else_is_not_fetched(
    here: Path, there: Path, shelf: Shelf, wanted: Wanted, field: str
) -> None:
    exchange.publish(here, WANTED, shelf, MOST)
    with pytest.raises(KeyMismatchError, match=f"^{field}: expected"):
        exchange.fetch(there, wanted, shelf, MOST, 0)
    assert nothing_stays(there)


def test_another_platforms_are_not_found(here: Path, there: Path, shelf: Shelf) -> None:
    exchange.publish(here, WANTED, shelf, MOST)
    with pytest.raises(NotFoundError):
        exchange.fetch(there.with_name(f"{NAME}-ffffffffffff"), WANTED, shelf, MOST, 0)


def put_archive(shelf: Shelf, data: bytes, **changes: Any) -> None:
    """Put a label and an archive on the shelf as whoever may write there could."""
    label = Label(
        checkpoint=NAME,
        key=WANTED.key,
        platform=place.platform(),
        path=WANTED.path,
        archive="a.tar",
        size=len(data),
        blake3=blake3(data).hexdigest(),
        entries=1,
        unpacked=5,
    )._replace(**changes)
    shelf.put("a.tar", len(data), [memoryview(data)])
    text = label.encode()
    shelf.put(f"{NAME}-{place.platform()}.json", len(text), [memoryview(text)])


def tar(*members: tuple[str, dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as made:
        for name, fields in members:
            info = tarfile.TarInfo(name)
            data = b"graph" if fields.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else b""
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            made.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(tar(("../escaped", {})), id="a path that escapes"),
        pytest.param(tar(("/escaped", {})), id="an absolute path"),
        pytest.param(tar((".checkpoint", {})), id="a hidden name"),
        pytest.param(tar(("a", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})), id="a link"),
        pytest.param(
            tar(("a", {}), ("b", {"type": tarfile.LNKTYPE, "linkname": "a"})), id="a hard link"
        ),
        pytest.param(tar(("a", {"type": tarfile.FIFOTYPE})), id="a FIFO"),
        pytest.param(tar(("a", {"type": tarfile.CHRTYPE})), id="a device"),
        pytest.param(tar(("a", {"type": tarfile.DIRTYPE})), id="a directory"),
        pytest.param(tar(("a", {"pax_headers": {"GNU.sparse.map": "x"}})), id="a garbled map"),
        pytest.param(tar(("a", {"pax_headers": {"size": f"-{2**70}"}})), id="less than nothing"),
        pytest.param(
            tar(("a", {"pax_headers": {"comment": "x"}}))[:1024] * 1000, id="headers without end"
        ),
        pytest.param(tar(("a", {}), ("b", {})), id="more files than told"),
        pytest.param(tar(("a", {}), ("a", {})), id="a file twice"),
        pytest.param(tar(), id="fewer files than told"),
        pytest.param(tar(("a", {}))[:514], id="a torn end"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x1f\x8b\x08" + b"\0" * 700, id="something compressed"),
        pytest.param(os.urandom(2048), id="noise"),
    ],
)
def test_an_archive_that_we_did_not_make_leaves_nothing(
    tmp_path: Path, there: Path, shelf: Shelf, data: bytes
) -> None:
    put_archive(shelf, data)
    with pytest.raises(ShardbootError):
        exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert nothing_stays(there)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"blake3": "0" * 64}, id="other bytes"),
        pytest.param({"size": 1}, id="another size"),
        pytest.param({"unpacked": 2 * MOST}, id="too large unpacked"),
        pytest.param({"unpacked": 4}, id="larger than told"),
    ],
)
def test_an_archive_must_be_what_its_label_says(
    there: Path, shelf: Shelf, changes: dict[str, Any]
) -> None:
    put_archive(shelf, tar(("a", {})), **changes)
    with pytest.raises(ShardbootError):
        exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert nothing_stays(there)


@pytest.mark.parametrize(
    "change",
    [
        lambda label: label.pop("key"),
        lambda label: label.update(more=1),
        lambda label: label.update(schema=2),
        lambda label: label.update(size=-1),
        lambda label: label.update(size=True),
        lambda label: label.update(entries="1"),
        lambda label: label.update(blake3="../a"),
        lambda label: label.update(archive="../a.tar"),
        lambda label: label.update(archive=".a.tar"),
        lambda label: label.update(archive="a/b.tar"),
        lambda label: label.update(path="/" * 5000),
    ],
)
def test_a_label_that_is_not_one_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    label = Label(NAME, "0" * 64, "0" * 12, "/p", "a.tar", 1, "0" * 64, 1, 1)
    document = json.loads(label.encode())
    assert decode(json.dumps(document).encode()) == label
    change(document)
    with pytest.raises(ManifestError):
        decode(json.dumps(document).encode())
    for odd in (b"", b"[]", b"{", b"[" * 100_000):
        with pytest.raises(ManifestError):
            decode(odd)


def test_what_is_on_a_shelf_is_no_checkpoint(tmp_path: Path, here: Path) -> None:
    store = DirectoryStore(tmp_path / "shared")
    store.root.mkdir()
    exchange.publish(here, WANTED, shelf_of(store), MOST)
    assert store.names() == []
    assert os.listdir(store.root) == [SHELF]


def test_a_link_on_a_shelf_is_not_followed(tmp_path: Path, there: Path) -> None:
    store = DirectoryStore(tmp_path / "shared")
    store.root.mkdir()
    shelf = shelf_of(store)
    put_archive(shelf, tar(("a", {})))
    (store.root / SHELF / "a.tar").rename(tmp_path / "a.tar")
    (store.root / SHELF / "a.tar").symlink_to(tmp_path / "a.tar")
    with pytest.raises(ShardbootError):
        exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert nothing_stays(there)


def test_no_more_files_are_packed_than_are_unpacked(
    here: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_ENTRIES", 2)
    with pytest.raises(SpaceError):
        exchange.publish(here, WANTED, shelf, MOST)


def test_a_torn_archive_is_damaged(there: Path, shelf: Shelf) -> None:
    put_archive(shelf, tar(("a", {})))
    data = bytearray(tar(("a", {})))
    data[600] ^= 1
    shelf.put("a.tar", len(data), [memoryview(bytes(data))])
    with pytest.raises(DamagedError):
        exchange.fetch(there, WANTED, shelf, MOST, 0)


def test_a_disk_that_fails_under_an_archive_is_no_bug(
    there: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    put_archive(shelf, tar(("a", {})))
    monkeypatch.setattr(tarfile, "open", failing)
    with pytest.raises(StagingError, match="Input/output error"):
        exchange.fetch(there, WANTED, shelf, MOST, 0)
    assert nothing_stays(there)


def test_on_a_shelf_stays_what_a_published_checkpoint_has_and_what_is_young(
    here: Path, shelf: Shelf
) -> None:
    exchange.publish(here, WANTED, shelf, MOST)
    shelf.put("model-1234567890ab-left.tar", 4, [memoryview(b"left")])
    later = time.time() + 100.0

    def gone(published: list[str], grace: float, *, dry_run: bool = False) -> list[str]:
        done = collect_shared(shelf, published, grace, later, dry_run=dry_run)
        return [verdict.name for verdict in done]

    assert gone([], 1000.0) == []
    assert gone([NAME], 10.0, dry_run=True) == ["model-1234567890ab-left.tar"]
    assert len(shelf.names()) == 3
    assert gone([NAME], 10.0) == ["model-1234567890ab-left.tar"]
    assert len(shelf.names()) == 2
    assert gone([], 10.0)[0] == f"{NAME}-{place.platform()}.json"
    assert shelf.names() == {}
