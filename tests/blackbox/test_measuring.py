"""`shardboot probe` as a command: what it prints, what it refuses, and that nothing stays."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import House, is_gone, snapshot
from checkpoints import make_checkpoint
from processes import descendants

from entrypoint.insight.examine import SCRATCH

QUICK = ("--seconds", 0.2, "--size", "4MiB", "--workers", 2)


def test_a_directory_is_measured_and_left_as_it_was(house: House) -> None:
    (house.shared / "file").write_text("somebody's")
    before = snapshot(house.shared / "file")
    found = house.run("probe", house.shared, *QUICK, "--format", "json").json
    assert found["verdict"] in ("serve", "copy", "keep-away")
    assert found["reasons"][0].keys() == {"code", "text"}
    assert found["path"] == str(house.shared)
    assert [rate["workers"] for rate in found["write"]] == [1, 2]
    assert [rate["amount"] for rate in found["read"]] == [3 << 19, 3 << 19]
    assert found["small"].keys() == {"create", "create+fsync", "stat", "read", "unlink"}
    assert found["fsync"]["p99_ms"] >= found["fsync"]["median_ms"] > 0
    assert found["rename"]["into_place"]["atomic"]
    assert found["flock"] == "honoured"
    assert found["inotify"] == {"own": True, "across": None}
    assert found["mmap"] is True
    assert (found["failures"], found["hung"], found["unwritable"]) == ({}, None, None)
    assert found["file_system"]["free_bytes"] > 0
    assert os.listdir(house.shared) == ["file"]
    assert snapshot(house.shared / "file") == before


def test_a_relative_path_and_a_file_url_mean_the_same(house: House) -> None:
    for word in ("shared", f"file://{house.shared}"):
        boot = house.run("probe", word, *QUICK)
        assert boot.stdout.startswith(f"{house.shared}: ")
        assert boot.stderr == ""


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(house: House, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("PIL")
    picture = house.root / f"picture.{suffix}"
    assert house.run("probe", house.shared, *QUICK, "--plot", picture).status == 0
    assert picture.read_bytes().startswith(b"<svg" if suffix == "svg" else b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("none",), 30, "No such file or directory"),
        (("model/config.json",), 30, "expected a directory, found a file"),
        (("shared", "--plot", "picture.jpg"), 2, "expected FILE.svg or FILE.png"),
        (("shared", "--plot", "none/picture.svg"), 2, "none: not a directory"),
        (("shared", "--size", "much"), 2, "expected a size such as 4GiB"),
        (("shared", "--size", "1kB"), 2, "expected at least"),
        (("shared", "--seconds", "0"), 2, "expected 0.1 to 600"),
        (("shared", "--workers", "1"), 2, "2<=x<=64"),
        (("ftp://host/path",), 10, "not a kind of store"),
        (("shared", "--also", "model", *QUICK), 10, "does not show what is written to"),
        (("shared", "--reserve-bytes", "900TB", *QUICK), 42, "kept in reserve"),
    ],
)
def test_what_cannot_be_measured_is_said(
    house: House, words: tuple[object, ...], status: int, says: str
) -> None:
    boot = house.run("probe", *words)
    assert boot.status == status, boot.stderr
    assert says in boot.stderr
    assert boot.stdout == ""
    assert os.listdir(house.shared) == []


def test_what_an_earlier_probe_left_goes_but_nothing_of_others(house: House) -> None:
    names = {"old": f"{SCRATCH}old", "young": f"{SCRATCH}young", "not-ours": "shardboot-probe-x"}
    for name in names.values():
        (house.shared / name / "below").mkdir(parents=True)
    (house.shared / f"{SCRATCH}file").touch()
    for name in (names["old"], names["not-ours"], f"{SCRATCH}file"):
        os.utime(house.shared / name, (1, 1))
    assert house.run("probe", house.shared, *QUICK).status == 0
    left = {names["young"], names["not-ours"], f"{SCRATCH}file"}
    assert set(os.listdir(house.shared)) == left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_on_the_way_it_leaves_nothing(house: House, number: signal.Signals) -> None:
    process = house.start("probe", house.shared, "--seconds", 60, "--size", "64MiB")
    deadline = time.monotonic() + 20
    # By then there are processes of all kinds.
    while not [*house.shared.glob(f"{SCRATCH}*/of-many-*")]:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    family = descendants(process.pid)
    assert family
    process.send_signal(number)
    boot = house.finish(process)
    assert boot.status == (128 + number if number == signal.SIGTERM else -number)
    while os.listdir(house.shared) or not all(map(is_gone, family)):
        assert time.monotonic() < deadline, os.listdir(house.shared)
        time.sleep(0.02)


@pytest.fixture
def closed(house: House) -> Iterator[Path]:
    """Yield a directory with checkpoints that another user may read, and not write."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    root = Path(tempfile.mkdtemp(prefix="shardboot-probe-"))
    try:
        make_checkpoint(root)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield root
    finally:
        import shutil

        shutil.rmtree(root)


def test_where_nothing_may_be_written_existing_checkpoints_are_read(
    house: House, closed: Path
) -> None:
    before = snapshot(closed)
    found = house.run("probe", closed, *QUICK, "--user", "2000:2000", "--format", "json").json
    assert found["unwritable"] == "Permission denied"
    assert found["write"] == []
    assert sum(rate["amount"] for rate in found["read"]) > 0
    assert found["mmap"] is True
    assert "read-only" in [reason["code"] for reason in found["reasons"]]
    assert snapshot(closed) == before
    closed.chmod(0o700)
    boot = house.run("probe", closed, *QUICK, "--user", "2000:2000")
    assert (boot.status, boot.stdout) == (60, "")
    assert "Permission denied" in boot.stderr
