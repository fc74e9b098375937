from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from entrypoint.insight.findings import Place
from entrypoint.insight.mount import as_text, look, mount_above, parse, place_of

TABLE = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 22 0:40 / /mnt/models ro,nosuid - nfs4 server:/export rw,vers=4.2,local_lock=none,addr=10.0.0.9
31 22 0:41 / /mnt/with\040blank rw shared:7 master:2 - cifs //user:word@host/share rw,password=word
32 22 0:42 / /mnt/models/inner rw - fuse.juicefs JuiceFS:nodes rw,user_id=0
33 22 0:43 / /run rw - tmpfs  rw,size=4k
34 22 0:44 / /mnt/models rw - fuse.sshfs me@host:/ rw
35 22 0:45 / /empty rw - tmpfs
no line of a table
"""


def test_lines_become_mounts_and_no_password_is_kept() -> None:
    mounts = {mount.number: mount for mount in parse(TABLE)}
    assert [mount.kind for mount in mounts.values()] == [
        *("ext4", "nfs4", "cifs", "fuse.juicefs", "tmpfs", "fuse.sshfs"),
    ]
    assert mounts[22].options == ("rw", "relatime", "discard")
    assert mounts[30].options == ("ro", "nosuid", "rw", "vers=4.2", "local_lock=none")
    assert mounts[31].point == "/mnt/with blank"
    assert mounts[31].source == "//host/share"
    assert "word" not in str(mounts[31])
    assert mounts[33].options == ("rw", "size=4k")


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/", 22),
        ("/mnt", 22),
        ("/mnt/modelsandmore", 22),
        ("/mnt/models", 34),
        ("/mnt/models/a/b", 34),
        ("/mnt/models/inner/a", 32),
        ("/mnt/with blank/x", 31),
        ("/run", 33),
    ],
)
def test_a_path_lies_on_the_last_of_the_nearest_mounts(path: str, number: int) -> None:
    found = mount_above(parse(TABLE), path)
    assert found is not None
    assert found.number == number


def test_without_a_table_nothing_is_said() -> None:
    assert mount_above([], "/mnt") is None


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("ext4", "disk"),
        ("fuseblk", "disk"),
        ("squashfs", "image"),
        ("nfs4", "network"),
        ("virtiofs", "network"),
        ("fuse.glusterfs", "network"),
        ("fuse.juicefs", "fuse"),
        ("fuse", "fuse"),
        ("fuse.fuse-overlayfs", "layer"),
        ("overlay", "layer"),
        ("tmpfs", "memory"),
        ("fusion", "unknown"),
        ("0x1234", "unknown"),
    ],
)
def test_kinds_have_a_place(kind: str, place: Place) -> None:
    assert place_of(kind) == place


def test_a_directory_is_on_what_stat_says(tmp_path: Path) -> None:
    found = look(tmp_path)
    words = ["findmnt", "--noheadings", "--output", "FSTYPE,TARGET", "--target", str(tmp_path)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    assert [found.kind, found.mount_point] == said
    assert found.total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    by_text = as_text(str(tmp_path))
    assert by_text is not None
    assert (by_text.kind, by_text.mount_point) == (found.kind, found.mount_point)


def test_a_link_is_where_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert look(tmp_path / "link").kind == "proc"


@pytest.mark.parametrize(("path", "kind"), [("/dev/shm", "tmpfs"), ("/proc", "0x9fa0")])  # noqa: S108
def test_without_proc_the_magic_tells(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.insight.mount.MOUNTS", "/nowhere")
    found = look(Path(path))
    assert (found.kind, found.mount_point) == (kind, "")
    assert as_text(path) is None
