"""Pins: checkpoints that must stay, by name.

    ROOT/.pins/NAME        an empty file

They lie in the store, since a pin must hold for everyone who may collect there: other nodes and
containers have state directories of their own. Published bytes never change, so they lie beside
the checkpoints; a pin outlives a checkpoint that is damaged and copied again.
"""

from __future__ import annotations

import os
from pathlib import Path

from entrypoint.checkpoint.entry import check_path
from entrypoint.errors import ManifestError, OwnershipError, StoreError
from entrypoint.store import tree

PINS = ".pins"
_READABLE = 0o055
"""No secrets; and an operator who is root writes what the service user must read."""


def pinned(root: Path) -> frozenset[str]:
    """Return all pinned names. Raises: StoreError when that cannot be known."""
    try:
        return frozenset(os.listdir(root / PINS))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise StoreError(f"{root / PINS}: {error.strerror}") from error


def pin(root: Path, name: str, dir_mode: int) -> None:
    """Pin a name; durable on return. Raises: ManifestError for a bad name; OwnershipError."""
    path = _path(root, name)
    try:
        tree.make_hidden(root, PINS, dir_mode | _READABLE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.close(descriptor)
        tree.sync_directory(path.parent)
        tree.sync_directory(root)
    except OSError as error:
        raise _denied(path, error) from error


def unpin(root: Path, name: str) -> bool:
    """Take a pin back; return whether there was one. Raises: as `pin`."""
    path = _path(root, name)
    try:
        path.unlink()
        tree.sync_directory(path.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _denied(path, error) from error
    return True


def _path(root: Path, name: str) -> Path:
    check_path(name, "name")
    if "/" in name:
        raise ManifestError(f"{name}: a checkpoint's name has no directories")
    return root / PINS / name


def _denied(path: Path, error: OSError) -> OwnershipError:
    return OwnershipError(
        f"{path}: {error.strerror}", hint="pin and unpin as the user who owns the store"
    )
