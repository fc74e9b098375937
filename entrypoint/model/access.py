"""Whether this user may read the source: by opening, since modes do not tell all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import OwnershipError
from entrypoint.model.bounded import HUNG_SECONDS, Alive, while_alive


def unreadable(directory: str, paths: Sequence[str], silence: float = HUNG_SECONDS) -> list[str]:
    """Open files in a child, waited for while it gets on; return those this user may not read."""
    denied = while_alive(silence, lambda alive: _denied(directory, paths, alive))
    return cast("list[str]", denied or [])


def not_readable(path: str) -> OwnershipError:
    """Return the error of a file or directory that this user may not read."""
    msg = f"{path}: uid {os.geteuid()} may not read the model"
    return OwnershipError(msg, hint="chown or chmod the source, or choose another --user")


def may_open(path: str) -> bool:
    """Open a file for reading: False where this user may not. Raises: OSError where it fails."""
    # Modes do not tell: of ACLs, of root_squash, of what a FUSE server thinks.
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return False
    return True


def _denied(directory: str, paths: Sequence[str], alive: Alive) -> list[Json]:
    denied: list[Json] = []
    for path in paths:
        alive()
        try:
            if not may_open(os.path.join(directory, path)):
                denied.append(path)
        except OSError:
            # Whoever reads it will say what is wrong.
            continue
    return denied
