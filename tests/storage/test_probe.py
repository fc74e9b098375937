"""What `probe` says of real file systems: a disk, memory, a full one, one that hangs, a bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gateway
import pytest
from blackbox.harness import House
from checkpoints import make_checkpoint
from mounts import hung, mounted
from processes import descendants, start_of

from entrypoint.errors import SpaceError
from entrypoint.insight import examine
from entrypoint.insight.probe import probe

QUICK = ("--seconds", 0.2, "--size", "4MiB", "--workers", 2, "--format", "json")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "house")
    yield made
    made.close()


def codes(found: Any) -> list[str]:
    return [reason["code"] for reason in found["reasons"]]


@pytest.mark.parametrize(
    ("kind", "word", "cause", "cold"),
    [
        ("ext4", "serve", "disk", ("O_DIRECT",)),
        ("tmpfs", "keep-away", "memory", ("memory",)),
    ],
)
def test_kinds_are_told_apart(
    house: House, tmp_path: Path, kind: str, word: str, cause: str, cold: tuple[str, ...]
) -> None:
    with mounted(kind, tmp_path, 64) as point:
        found = house.run("probe", point, *QUICK).json
        assert (found["verdict"], codes(found)[0]) == (word, cause)
        assert (found["file_system"]["kind"], found["cold"]) == (kind, *cold)
        assert found["file_system"]["mount_point"] == str(point)
        assert [path for path in os.listdir(point) if path != "lost+found"] == []


def test_a_read_only_disk_is_read_alone(house: House, tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, 64) as point:
        make_checkpoint(point / "store")
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        found = house.run("probe", point / "store", *QUICK).json
    assert (found["verdict"], found["unwritable"]) == ("serve", "Read-only file system")
    assert "ro" in found["file_system"]["options"]
    assert found["read"]
    assert found["small"] == {}


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_disk_is_refused_with_numbers_and_left_as_it_was(
    house: House, tmp_path: Path, kind: str
) -> None:
    with mounted(kind, tmp_path, 64) as point:
        free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
        ballast = os.open(point / "ballast", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(ballast, 0, free - (3 << 20))
        os.close(ballast)
        boot = house.run("probe", point, *QUICK)
        assert boot.status == 42
        assert "4194304 bytes needed and 0 kept in reserve" in boot.stderr
        assert set(os.listdir(point)) <= {"ballast", "lost+found"}


def test_a_disk_that_fills_up_on_the_way_is_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "require_room", lambda *_: None)
    order = examine.Order(size=8 << 20, seconds=0.2, workers=2, reserve=0)
    with mounted("tmpfs", tmp_path, 4) as point:
        with pytest.raises(SpaceError, match=f"{point}: No space left on device"):
            probe(point, None, order, lambda _: None)
        assert os.listdir(point) == []


def test_a_mount_that_hangs_is_said_and_not_waited_for(house: House, tmp_path: Path) -> None:
    with hung(tmp_path / "hung") as point:
        begun = time.monotonic()
        boot = house.run("probe", point / "checkpoints", "--format", "json")
        assert time.monotonic() - begun < 10
        assert boot.status == 30
        assert "no answer (look)" in boot.stderr
        found = json.loads(boot.stdout)
        assert (found["verdict"], found["hung"], codes(found)) == ("keep-away", "look", ["hung"])
        assert found["file_system"]["mount_point"] == str(point)
        assert found["file_system"]["place"] == "fuse"


def test_a_bucket_is_measured_and_left_empty(house: House, s3: gateway.S3) -> None:
    url = f"s3://{s3.bucket}/probed"
    boot = house.run("probe", url, *QUICK, **s3.environ())
    found = boot.json
    assert (found["verdict"], codes(found)[0]) == ("copy", "object")
    assert found["file_system"]["kind"] == "s3"
    assert [rate["workers"] for rate in found["write"]] == [1, 2]
    assert all(rate["amount"] >= 1 << 23 for rate in found["read"])
    assert found["small"].keys() == {"put", "head", "get", "list", "delete"}
    # This server ignores conditions; whether one does is the finding.
    assert ("conditional" in codes(found)) == (found["conditional_put"] is False)
    assert found["failures"] == {}
    assert list_all(s3) == []
    assert "not-to-be-seen" not in boot.stdout + boot.stderr


def list_all(s3: gateway.S3) -> list[str]:
    from obstore.store import S3Store

    store = S3Store(
        s3.bucket,
        prefix="probed",
        access_key_id="tester",
        secret_access_key="not-to-be-seen",  # noqa: S106 - the gateway's own
        region="us-east-1",
        endpoint=f"http://{s3.host}:{s3.port}",
        client_options={"allow_http": True},
    )
    return [meta["path"] for chunk in store.list() for meta in chunk]


def test_a_bucket_that_is_not_there_is_exit_30(house: House, s3: gateway.S3) -> None:
    boot = house.run("probe", "s3://none-such/x", *QUICK, **s3.environ())
    assert (boot.status, boot.stdout) == (30, "")
    assert "s3://none-such/x" in boot.stderr


def test_stopped_on_the_way_a_bucket_is_left_empty(house: House, s3: gateway.S3) -> None:
    words = ("--seconds", 60, "--size", "1GiB")
    process = house.start("probe", f"s3://{s3.bucket}/probed", *words, **s3.environ())
    deadline = time.monotonic() + 20
    while not list_all(s3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    assert family
    process.send_signal(signal.SIGTERM)
    assert house.finish(process).status == 128 + signal.SIGTERM
    assert [pid for pid, start in family.items() if start_of(pid) == start] == []
    assert list_all(s3) == []
