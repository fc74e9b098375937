"""What tells the file system under a source from any other that is mounted in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mounts import mounted

from entrypoint.model import mount
from entrypoint.model.mount import instance_of, kind_of


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    monkeypatch.setattr(mount, "MOUNTS", path)
    return path


def line(device: int, kind: str) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    return f"36 35 {number} / /mnt/a\\040b rw,noatime master:1 - {kind} server:/x rw\n"


def test_the_kind_is_what_the_kernels_table_says(table: Path) -> None:
    table.write_text("odd\n" + line(7, "squashfs") + line(8, "nfs4"))
    assert [kind_of(device) for device in (7, 8, 9)] == ["squashfs", "nfs4", ""]


def test_without_a_table_there_is_no_kind(table: Path) -> None:
    assert not table.exists()
    assert kind_of(7) == ""


def test_where_servers_set_the_times_any_mount_will_do(tmp_path: Path, table: Path) -> None:
    table.write_text(line(tmp_path.stat().st_dev, "lustre"))
    assert instance_of(str(tmp_path)) == "live"


@pytest.mark.parametrize(("goes", "known"), [("1", True), ("0", False)])
def test_a_loop_device_counts_if_it_goes_with_its_last_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str, known: bool
) -> None:
    device = tmp_path.stat().st_dev
    about = tmp_path / f"{os.major(device)}:{os.minor(device)}"
    (about / "loop").mkdir(parents=True)
    (about / "loop" / "autoclear").write_text(f"{goes}\n")
    (about / "diskseq").write_text("42\n")
    monkeypatch.setattr(mount, "BLOCK_DEVICES", tmp_path)
    assert instance_of(str(tmp_path)).endswith(" disk 42") is known


def test_one_mount_is_not_taken_for_the_next_at_its_place(tmp_path: Path) -> None:
    def once() -> str:
        with mounted("tmpfs", tmp_path, 1) as point:
            found = instance_of(str(point))
            assert instance_of(str(point)) == found
        point.rmdir()
        return found

    first = once()
    if not first:
        pytest.skip("before Linux 6.8 mounts have no numbers of their own")
    assert once() != first
