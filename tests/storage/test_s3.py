"""A real S3 server: the contract, pushers that race and pushers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Act, Proxy, proxy
from gateway import S3
from store_contract import Made, ObjectContract, read_back, unnamed
from waiting import until

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.store.base import open_store
from entrypoint.store.leftovers import sweep
from entrypoint.store.objects import ObjectStore

PUSH = """
import signal
import sys
import store_driver
from entrypoint.errors import Interrupted

def stop(number, frame):
    raise Interrupted(number)

signal.signal(signal.SIGTERM, stop)
try:
    store_driver.copy(sys.argv[2], sys.argv[1])
except Interrupted as error:
    sys.exit(128 + error.signal_number)
"""


@pytest.fixture(autouse=True)
def credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)


def store_at(s3: S3, tmp_path: Path) -> ObjectStore:
    store = open_store(f"s3://{s3.bucket}/{tmp_path.name}/store")
    assert isinstance(store, ObjectStore)
    return store


class TestOnS3(ObjectContract):
    @pytest.fixture
    def store(self, s3: S3, tmp_path: Path) -> ObjectStore:
        return store_at(s3, tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made")


@pytest.fixture
def manifest(made: Made) -> Manifest:
    return made.checkpoint()


@pytest.fixture
def between(s3: S3) -> Iterator[Proxy]:
    with proxy(s3) as server:
        yield server


def pusher(s3: S3, made: Made, where: str, port: int | None = None) -> subprocess.Popen[bytes]:
    environ = os.environ | s3.environ(port)
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PUSH, str(made.root / "0"), where]
    return subprocess.Popen(command, env=environ)


def test_many_nodes_push_one_checkpoint_and_it_is_whole(
    s3: S3, made: Made, manifest: Manifest, tmp_path: Path
) -> None:
    store = store_at(s3, tmp_path)
    pushers = [pusher(s3, made, store.where) for _ in range(6)]
    assert [each.wait() for each in pushers] == [0] * 6
    assert store.names() == [manifest.name]
    assert read_back(store, manifest.name) == manifest
    # This server ignores conditions, so a loser cannot know that it is one.
    sweep(store, -1)
    assert unnamed(store) == []
    assert read_back(store, manifest.name) == manifest


@pytest.mark.parametrize(
    ("method", "part", "act", "is_published"),
    [
        ("PUT", "model-rank-1", "hang", False),
        ("GET", "list-type", "hang", False),
        ("PUT", ".published", "hang", False),
        ("PUT", ".published", "lost", True),
    ],
    ids=["a file", "the check", "before the last put", "behind the last put"],
)
def test_a_pusher_killed_at_any_moment_leaves_a_name_whole_or_absent(
    s3: S3,
    between: Proxy,
    made: Made,
    manifest: Manifest,
    tmp_path: Path,
    method: str,
    part: str,
    act: Act,
    is_published: bool,
) -> None:
    store = store_at(s3, tmp_path)
    reached = threading.Event()

    def fails(request: str) -> Act | None:
        if request.startswith(method) and part in request:
            reached.set()
            return act
        return None

    between.fails = fails
    child = pusher(s3, made, store.where, between.server_port)
    assert reached.wait(20)
    if is_published:
        until(lambda: store.names() != [])
    child.kill()
    child.wait()
    assert store.names() == ([manifest.name] if is_published else [])
    if is_published:
        assert read_back(store, manifest.name) == manifest
    # What was on its way when it died arrives all the same.
    until(lambda: sweep(store, -1) == [] and unnamed(store) == [])
    assert store.names() == ([manifest.name] if is_published else [])


def test_a_pusher_that_is_stopped_ends_soon_and_leaves_its_files_to_gc(
    s3: S3, between: Proxy, made: Made, manifest: Manifest, tmp_path: Path
) -> None:
    store = store_at(s3, tmp_path)
    reached = threading.Event()

    def fails(request: str) -> Act | None:
        if request.startswith("PUT") and "model-rank-1-part-1" in request:
            reached.set()
            return "hang"
        return None

    between.fails = fails
    child = pusher(s3, made, store.where, between.server_port)
    assert reached.wait(20)
    # None is on its way any more, to arrive behind the sweep.
    until(lambda: len(unnamed(store)) == len(manifest.files) - 1)
    child.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert child.wait(60) == 128 + signal.SIGTERM
    # Waiting for the answer would take 20 s and more.
    assert time.monotonic() - started < 12
    assert store.names() == []
    assert len(unnamed(store)) == len(manifest.files) - 1
    assert len(sweep(store, -1)) == 1
    assert unnamed(store) == []
