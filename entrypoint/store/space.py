"""Room for a checkpoint, asked before any byte is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, decode
from entrypoint.errors import ManifestError, SpaceError, StoreError
from entrypoint.store import tree
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.publish import ranks_held

_LOOKS = 5
_LOOK_SECONDS = 0.1
_HINT = "collect old checkpoints (`shardboot gc`), or give the store more room"


def require_room(root: Path, needed: int, reserve: int, max_bytes: int | None) -> None:
    """Refuse unless `needed` more bytes fit: on the disk beside `reserve`, and in `max_bytes`.

    A pod's limit is invisible to statvfs, hence the store's own bound.
    Raises: SpaceError with the numbers; StoreError.
    """
    free = _free(root, needed + reserve)
    if needed + reserve > free:
        raise SpaceError(
            f"{root}: {needed} bytes needed and {reserve} kept in reserve, {free} free", hint=_HINT
        )
    if max_bytes is None:
        return
    used = used_bytes(root)
    if used + needed > max_bytes:
        raise SpaceError(
            f"{root}: {needed} bytes needed, {used} of at most {max_bytes} in use", hint=_HINT
        )


def _free(root: Path, wanted: int) -> int:
    free = 0
    for _ in range(_LOOKS):
        try:
            status = os.statvfs(root)
        except OSError as error:
            raise StoreError(f"{root}: {error.strerror}") from error
        # What an ordinary user may take; root's share is no room for us.
        free = status.f_bavail * status.f_frsize
        if free >= wanted:
            break
        # XFS and btrfs give back what was just deleted a little later.
        time.sleep(_LOOK_SECONDS)
    return free


def used_bytes(root: Path) -> int:
    """Return the bytes of all published checkpoints, as their manifests say. Raises: StoreError."""
    return sum(_bytes_of(root / name) for name in DirectoryStore(root).names())


def _bytes_of(checkpoint: Path) -> int:
    try:
        manifest = decode(read_bounded(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, ManifestError):
        return _bytes_found(checkpoint)
    held = ranks_held(checkpoint)
    return sum(e.size for e in manifest.files_for(manifest.layout.ranks if held is None else held))


def _bytes_found(checkpoint: Path) -> int:
    """Return what lies in a directory whose manifest cannot be read: it takes room all the same."""
    try:
        return sum(status.st_size for _, status in tree.files_beneath(checkpoint))
    except OSError:
        return 0
