"""Which mounted file system a source's file lies on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
BLOCK_DEVICES: Final = Path("/sys/dev/block")

_KEEPS_SECONDS: Final = ("lustre",)
"""Its servers set every ctime by their clocks, and count in seconds."""

_AT_FDCWD: Final = -100
_UNIQUE_ID: Final = 0x4000
"""STATX_MNT_ID_UNIQUE, since Linux 6.8: the number of a mount that no later one gets."""
_STATX_BYTES: Final = 256
_STATX_MOUNT: Final = 144


def kind_of(device: int) -> str:
    """Return the type of the file system with this number, or "" where the table lacks it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        table = MOUNTS.read_text(errors="replace")
    except OSError:
        return ""
    for line in table.splitlines():
        fields, _, end = line.partition(" - ")
        if fields.split()[2:3] == [number]:
            return end.partition(" ")[0]
    return ""


def instance_of(path: str) -> str:
    """Return what tells the file system under `path` from any other that is ever mounted there.

    "" where nothing does. It stands while a loop device of one image lives, and else while this
    very mount does, as in one run of a container.
    """
    device = os.stat(path).st_dev
    if kind_of(device) in _KEEPS_SECONDS:
        return "live"
    known = _loop(device) or _mount(path)
    return f"{BOOT_ID.read_text().strip()} {known}" if known else ""


def _loop(device: int) -> str:
    """Return the kernel's running number of a loop device that goes with its last mount."""
    about = BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}"
    try:
        if (about / "loop" / "autoclear").read_text().strip() != "1":
            # Its image may be another since it was mounted last.
            return ""
        return f"disk {(about / 'diskseq').read_text().strip()}"
    except OSError:
        return ""


def _mount(path: str) -> str:
    import ctypes  # noqa: PLC0415 - few sources lie on an image

    statx = getattr(ctypes.CDLL(None), "statx", None)
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _UNIQUE_ID, buffer) != 0:
        return ""
    if not ctypes.c_uint32.from_buffer(buffer).value & _UNIQUE_ID:
        return ""
    return f"mount {ctypes.c_uint64.from_buffer(buffer, _STATX_MOUNT).value}"
