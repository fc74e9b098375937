"""Room for a checkpoint, asked before any byte is written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.inspect import ranks_in
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, decode
from entrypoint.errors import ManifestError, SpaceError, StoreError
from entrypoint.store import tree
from entrypoint.store.directory import DirectoryStore

_LOOKS = 5
_LOOK_SECONDS = 0.1
HINT = "collect old checkpoints (`shardboot gc`), or give the store more room"


class Limits(NamedTuple):
    """What must stay free on the disk, and how much the store may hold at most; in bytes."""

    reserve: int
    most: int | None = None


class Shortage(NamedTuple):
    """How many bytes are missing, and in words what was needed and what there was."""

    missing: int
    text: str


def require_room(root: Path, needed: int, limits: Limits) -> None:
    """Refuse unless `needed` more bytes fit. Raises: SpaceError with the numbers; StoreError."""
    short = shortage(root, needed, limits)
    if short is not None:
        raise SpaceError(short.text, hint=HINT)


def shortage(root: Path, needed: int, limits: Limits) -> Shortage | None:
    """Return what is missing for `needed` more bytes, on the disk or within the store's bound.

    A pod's limit is invisible to statvfs, hence the bound. Raises: StoreError.
    """
    found: list[Shortage] = []
    free = _free(root, needed + limits.reserve)
    if needed + limits.reserve > free:
        text = f"{needed} bytes needed and {limits.reserve} kept in reserve, {free} free"
        found.append(Shortage(needed + limits.reserve - free, f"{root}: {text}"))
    if limits.most is not None:
        used = used_bytes(root)
        text = f"{needed} bytes needed, {used} of at most {limits.most} in use"
        found.append(Shortage(used + needed - limits.most, f"{root}: {text}"))
    worst = max(found, default=None)
    return worst if worst is not None and worst.missing > 0 else None


def _free(root: Path, wanted: int) -> int:
    """Return the bytes free, after a short wait where that is less than wanted.

    XFS gives back what was just deleted a moment later, btrfs up to half a minute later.
    """
    free = _free_now(root)
    if free >= wanted:
        return free
    from entrypoint.store import writeback  # noqa: PLC0415 - ctypes, and most often there is room

    writeback.settle(root)
    for _ in range(_LOOKS):
        free = _free_now(root)
        if free >= wanted:
            break
        time.sleep(_LOOK_SECONDS)
    return free


def _free_now(root: Path) -> int:
    try:
        status = os.statvfs(root)
    except OSError as error:
        raise StoreError(f"{root}: {error.strerror}") from error
    # What an ordinary user may take; root's share is no room for us.
    return status.f_bavail * status.f_frsize


def used_bytes(root: Path) -> int:
    """Return the bytes of all published checkpoints, as their manifests say. Raises: StoreError."""
    return sum(bytes_of(root / name) for name in DirectoryStore(root).names())


def bytes_of(checkpoint: Path) -> int:
    """Return the bytes of one published checkpoint, of the ranks held here."""
    try:
        manifest = decode(read_bounded(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, ManifestError):
        return _bytes_found(checkpoint)
    return manifest.size_for(ranks_in(checkpoint, manifest))


def _bytes_found(checkpoint: Path) -> int:
    """Return what lies in a directory whose manifest cannot be read: it takes room all the same."""
    try:
        return sum(status.st_size for _, status in tree.files_beneath(checkpoint))
    except OSError:
        return 0
