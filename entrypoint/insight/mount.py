"""What a path lies on: the kernel's table of mounts, read and put into classes.

Nothing here but `look` touches the path itself, which may hang.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint.insight.findings import FileSystem, Place

MOUNTS: Final = "/proc/self/mountinfo"

_PLACES: Final[tuple[tuple[Place, str], ...]] = (
    ("memory", "tmpfs ramfs devtmpfs hugetlbfs"),
    ("layer", "overlay aufs fuse.fuse-overlayfs"),
    ("network", "nfs nfs4 cifs smb2 smb3 ceph lustre gpfs beegfs glusterfs fuse.glusterfs afs"),
    ("network", "9p virtiofs ocfs2 gfs2 orangefs pvfs2 wekafs"),
    ("image", "squashfs erofs iso9660 fuse.squashfuse"),
    ("disk", "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs nilfs2 reiserfs"),
    ("disk", "vfat exfat ntfs3 fuseblk"),
)
"""virtiofs and 9p are a host's directory in a guest: others write there too."""

_MAGICS: Final = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x0000EF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
}
"""Of statfs(2): all there is where /proc shows no mounts."""

_TELLING: Final = (
    *("vers", "proto", "rsize", "wsize", "timeo", "actimeo", "lookupcache", "local_lock"),
    *("cache", "data", "size"),
)
"""Options shown with their value; that of any other may be a password."""


class Mount(NamedTuple):
    """One line of the table; `number` is the kernel's name for it."""

    number: int
    kind: str
    point: str
    source: str
    options: tuple[str, ...]


def parse(table: str) -> list[Mount]:
    """Read mountinfo (proc_pid_mountinfo(5)); lines that are none of its are left out."""
    return [mount for line in table.splitlines() for mount in _mount(line)]


def _mount(line: str) -> Iterator[Mount]:
    fields, _, end = line.partition(" - ")
    own, of_system = fields.split(), end.split()
    # The source may be empty, and the options of a mount may then be in its place.
    if len(own) < 6 or len(of_system) < 2 or not own[0].isdigit():  # noqa: PLR2004 - of the format
        return
    source = re.sub(r"//[^/@]*@", "//", _plain(of_system[1]))
    options = dict.fromkeys((*own[5].split(","), *of_system[-1].split(",")))
    shown = tuple(each for each in options if "=" not in each or each.split("=")[0] in _TELLING)
    yield Mount(int(own[0]), of_system[0], _plain(own[4]), source, shown)


def _plain(field: str) -> str:
    """Return a field without the octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mount_above(mounts: list[Mount], path: str) -> Mount | None:
    """Return the mount that an absolute path lies on, by its text alone: the path may hang."""
    found = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # Of several mounts on one point the last one is seen.
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def place_of(kind: str) -> Place:
    """Return which class of file systems a kind belongs to."""
    for place, kinds in _PLACES:
        if kind in kinds.split():
            return place
    return "fuse" if kind.partition(".")[0] == "fuse" else "unknown"


def as_text(path: str) -> FileSystem | None:
    """Return what the table says of a path, which is not touched; None where it says nothing."""
    try:
        mount = mount_above(parse(Path(MOUNTS).read_text(errors="replace")), path)
    except OSError:
        return None
    return mount and _file_system(mount)


def look(path: Path) -> FileSystem:
    """Return what an existing path lies on. May hang as its mount does. Raises: OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        space = os.fstatvfs(descriptor)
        # Links and binds in the path do not matter, nor mounts that hide others.
        found = _by_descriptor(descriptor) or as_text(os.path.realpath(path))
        if found is None:
            kind = _kind_by_magic(descriptor)
            found = FileSystem(kind, place_of(kind))
    finally:
        os.close(descriptor)
    options = found.options
    if space.f_flag & os.ST_RDONLY and "ro" not in options:
        options = ("ro", *options)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return found._replace(options=options, free=free, total=total)


def _file_system(mount: Mount) -> FileSystem:
    return FileSystem(mount.kind, place_of(mount.kind), mount.point, mount.source, mount.options)


def _by_descriptor(descriptor: int) -> FileSystem | None:
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        mounts = parse(Path(MOUNTS).read_text(errors="replace"))
    except OSError:
        return None
    number = re.search(r"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    return next((_file_system(m) for m in mounts if number and m.number == int(number[1])), None)


def _kind_by_magic(descriptor: int) -> str:
    # More than any architecture's struct statfs, whose first word is the magic.
    answer = (ctypes.c_ulong * 64)()
    library = ctypes.CDLL(None, use_errno=True)
    if library.fstatfs(descriptor, ctypes.byref(answer)) != 0:
        return "unknown"
    magic = answer[0] & 0xFFFFFFFF
    return _MAGICS.get(magic, hex(magic))
