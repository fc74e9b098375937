"""File systems of a chosen kind and size, mounted for the time of a test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MACHINES = (
    *("permission denied", "Permission denied", "Operation not permitted", "must be superuser"),
    *("failed to setup loop device", "could not find any free loop device", "No such device"),
    *("unknown filesystem type", "not supported"),
)
"""What mount(8) says where a machine, or its sandbox, has no such mounts at all."""


@contextlib.contextmanager
def mounted(kind: str, directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a fresh file system below `directory`; skip, with the reason, where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting {kind} needs root")
    point = directory / kind
    point.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(point)]
    else:
        maker = shutil.which(f"mkfs.{kind}")
        if maker is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        image = directory / f"{kind}.img"
        image.touch()
        os.truncate(image, megabytes << 20)
        subprocess.run([maker, str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(point)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip()
        # Anything else is a test that never ran, and nobody would see it.
        assert any(reason in said for reason in MACHINES), said
        pytest.skip(f"{kind} cannot be mounted here: {said}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False)


@contextlib.contextmanager
def image_mounted(contents: Path, point: Path, epoch: int) -> Iterator[None]:
    """Make an image of `contents` of the date `epoch`, mount it at `point`; skip where none is."""
    if os.geteuid() != 0 or shutil.which("mksquashfs") is None:
        pytest.skip("an image needs root and mksquashfs")
    image = contents.with_suffix(".squashfs")
    image.unlink(missing_ok=True)
    environ = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    make = [
        "mksquashfs",
        str(contents),
        str(image),
        "-quiet",
        "-no-progress",
        "-mkfs-time",
        str(epoch),
    ]
    subprocess.run(make, check=True, capture_output=True, env=environ)
    point.mkdir()
    command = ["mount", "-t", "squashfs", "-o", "loop,ro", str(image), str(point)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        assert any(reason in done.stderr for reason in MACHINES), done.stderr
        pytest.skip(f"squashfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


@contextlib.contextmanager
def hung(point: Path) -> Iterator[Path]:
    """Mount a file system whose server never answers, as NFS does when its host is gone."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("a mount that hangs needs root and /dev/fuse")
    point.mkdir(exist_ok=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hung", os.fsencode(point), b"fuse", 0, options.encode()) != 0:
        reason = os.strerror(ctypes.get_errno())
        os.close(server)
        pytest.skip(f"fuse cannot be mounted here: {reason}")
    try:
        yield point
    finally:
        # Without a server, everything that waits for it fails.
        os.close(server)
        subprocess.run(["umount", "--lazy", str(point)], check=False)
