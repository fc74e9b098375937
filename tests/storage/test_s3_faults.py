"""What real object storage does to its clients, done by a proxy in front of a real S3 server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import SECRET, Act, Proxy, proxy, times
from gateway import S3
from store_contract import Made, deep_verify, left_over, push, read_back, unnamed

from entrypoint.checkpoint.finding import Unreachable
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import StoreError
from entrypoint.state.memory import Memory
from entrypoint.store import transfer, upload
from entrypoint.store.bucket import Bucket, Patience, connect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.leftovers import sweep
from entrypoint.store.look import Bounds, Wanted, look
from entrypoint.store.objects import ObjectStore

QUICK = Patience(connecting=2, silence=2, request=5, tries=4, trying=12)
"""As patient as a test may be."""

SOON = 30
"""Seconds in which it must have given up; with the patience of a boot it would not."""

FOREVER = 10**6


@pytest.fixture
def faulty(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy(s3) as server:
        for name, value in s3.environ(server.server_port).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def store(faulty: Proxy, tmp_path: Path) -> ObjectStore:
    bucket = Bucket("s3", faulty.s3.bucket, tmp_path.name)
    return ObjectStore(bucket.where, lambda _: connect(bucket, QUICK))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made")


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "local").mkdir()
    return DirectoryStore(tmp_path / "local")


@pytest.fixture
def pushed(store: ObjectStore, made: Made) -> Manifest:
    manifest = made.checkpoint()
    push(made, manifest, store)
    return manifest


def pull(store: ObjectStore, local: DirectoryStore, manifest: Manifest) -> None:
    with local.stage(manifest.name) as staged:
        transfer.copy(store, manifest.name, manifest, manifest.files, staged)
        staged.commit(manifest)


@pytest.mark.parametrize(
    ("act", "part"),
    [
        ("slow-down", "GET"),
        ("slow-down", "list-type"),
        ("cut", "model-rank-0-part-0"),
        ("hang", "model-rank-0-part-0"),
    ],
)
def test_what_passes_is_waited_out_by_a_pull(
    store: ObjectStore,
    local: DirectoryStore,
    pushed: Manifest,
    faulty: Proxy,
    act: Act,
    part: str,
) -> None:
    faulty.fails = times(2, act, part)
    pull(store, local, pushed)
    deep_verify(local, pushed.name)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("slow-down", "503 Service Unavailable: SlowDown: Reduce your rate"),
        ("cut", "the connection broke before the answer ended"),
        ("hang", "no answer in time"),
        ("expired", "400 Bad Request: ExpiredToken: Expired"),
    ],
)
def test_what_stays_ends_a_pull_in_bounded_time_and_names_the_store(
    store: ObjectStore,
    local: DirectoryStore,
    pushed: Manifest,
    faulty: Proxy,
    act: Act,
    says: str,
) -> None:
    faulty.fails = times(FOREVER, act, "model-rank-0-part-0")
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        pull(store, local, pushed)
    assert time.monotonic() - started < SOON
    assert str(caught.value).startswith(f"{store.where}: {pushed.name}/model-rank-0-part-0")
    assert says in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert local.names() == []
    assert left_over(local) == []


def test_an_answer_that_breaks_too_often_for_the_client_is_gone_on_with(
    store: ObjectStore, local: DirectoryStore, made: Made, faulty: Proxy
) -> None:
    size = 40 << 20
    manifest = made.checkpoint(tensors=[("weight", "U8", (size,), size)])
    push(made, manifest, store)
    # Half of what was asked for comes each time, and the client tries four times.
    faulty.fails = times(7, "cut", "model-rank-0-part-0")
    pull(store, local, manifest)
    deep_verify(local, manifest.name)


def test_expired_credentials_are_not_tried_again(
    store: ObjectStore, pushed: Manifest, faulty: Proxy
) -> None:
    faulty.fails = times(FOREVER, "expired", "")
    faulty.requests.clear()
    with pytest.raises(StoreError, match="ExpiredToken") as caught:
        store.read_manifest(pushed.name)
    assert caught.value.hint == "renew the credentials"
    assert len(faulty.requests) == 1


@pytest.mark.parametrize(
    ("act", "part"),
    [
        ("slow-down", "uploads"),
        ("slow-down", "PUT"),
        ("slow-down", "POST"),
        ("slow-down", ".published"),
        ("hang", "partNumber=2"),
        ("lost", "config.json"),
    ],
)
def test_what_passes_is_waited_out_by_a_push(
    store: ObjectStore,
    made: Made,
    faulty: Proxy,
    act: Act,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", 5 * 1024 * 1024)
    manifest = made.checkpoint(tensors=[("weight", "U8", (12_000_000,), 12_000_000)])
    faulty.fails = times(1, act, part)
    assert push(made, manifest, store) == (manifest.name, "committed")
    assert read_back(store, manifest.name) == manifest


@pytest.mark.parametrize(
    ("act", "part"),
    [("slow-down", "PUT"), ("hang", "config.json"), ("expired", ".published")],
)
def test_what_stays_ends_a_push_and_nothing_is_listed(
    store: ObjectStore, made: Made, faulty: Proxy, act: Act, part: str
) -> None:
    manifest = made.checkpoint()
    faulty.fails = times(FOREVER, act, part)
    started = time.monotonic()
    with pytest.raises(StoreError, match=store.where):
        push(made, manifest, store)
    assert time.monotonic() - started < SOON
    faulty.fails = lambda _: None
    wait_for_copies()
    assert store.names() == []
    # A file whose last try was still on its way is left to a sweep.
    sweep(store, -1)
    assert unnamed(store) == []


def wait_for_copies() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("copy-"):
            thread.join()


def test_a_push_whose_last_answer_is_lost_looks_whether_it_worked(
    store: ObjectStore, made: Made, faulty: Proxy
) -> None:
    manifest = made.checkpoint()
    faulty.fails = times(1, "lost", ".published")
    assert push(made, manifest, store) == (manifest.name, "committed")
    assert read_back(store, manifest.name) == manifest


def test_a_store_that_never_answers_does_not_hold_a_look_up(
    store: ObjectStore, faulty: Proxy, pushed: Manifest, tmp_path: Path
) -> None:
    faulty.fails = times(FOREVER, "hang", "")
    wanted = Wanted(pushed.key, lambda _: True, lambda _: None)
    started = time.monotonic()
    found = look(store, wanted, Memory(tmp_path / "state"), Bounds(64, 1))
    assert isinstance(found, Unreachable)
    assert store.where in found.error
    assert time.monotonic() - started < SOON


def test_an_endpoint_that_is_not_there_is_said(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=f"{store.where}: no connection"):
        store.names()


def test_a_bucket_that_is_not_there_is_no_empty_store(faulty: Proxy) -> None:
    bucket = Bucket("s3", "no-such-bucket", "")
    with pytest.raises(StoreError, match="NoSuchBucket") as caught:
        ObjectStore(bucket.where, lambda _: connect(bucket, QUICK)).names()
    assert "make the bucket" in caught.value.hint


def test_wrong_credentials_are_said_and_not_shown(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(StoreError, match="403 Forbidden: SignatureDoesNotMatch") as caught:
        store.names()
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert "credentials" in caught.value.hint
