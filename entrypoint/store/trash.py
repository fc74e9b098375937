"""The trash: where a directory of a store goes in one step, and waits to be deleted.

A process that has its files open reads on, even once they are deleted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from entrypoint.store import tree

TRASH = ".trash"


def retire(root: Path, name: str, dir_mode: int = tree.DIR_MODE) -> None:
    """Take a published name away at once; its files stay in the trash until a sweep.

    Nothing happens if somebody else was faster. Raises: OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        discard(root, root / name, f"{name[:200]}.{os.urandom(4).hex()}", dir_mode)
        tree.sync_directory(root)


def discard(root: Path, path: Path, unique: str, dir_mode: int) -> None:
    """Move a directory of the store into its trash, as `unique`. Raises: OSError."""
    # Whoever may write into the store must be able to collect there.
    tree.make_hidden(root, TRASH, dir_mode)
    path.rename(root / TRASH / unique)


def empty(root: Path) -> list[str]:
    """Delete what is in the trash as far as that goes, and return the names that are gone.

    A file held open on NFS stays as `.nfsXXXX`; it goes once its reader is gone. A link in the
    place of the trash is not followed, nor one that somebody puts there meanwhile.
    """
    try:
        trash = os.open(root / TRASH, tree.DIRECTORY)
    except OSError:
        return []
    try:
        return [name for name in sorted(os.listdir(trash)) if tree.remove(Path(name), trash)]
    finally:
        os.close(trash)


def waiting(root: Path) -> list[Path]:
    """Return what waits in the trash to be deleted."""
    return tree.entries(root / TRASH)
