"""Servers that were told to stop, one file each: empty while nobody told them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import open_kept
from entrypoint.state.places import below

MAX_UNTOLD: Final = 64
"""One is made at every boot, and matters while that one lives; each costs a hit a stat."""

MAX_TOLD: Final = 256
"""More than there are boots in the end of the ledger, whose failed attempts they excuse."""


def open_note(root: Path, boot: str) -> int | None:
    """Return a descriptor of this boot's file: whatever is written there says that it was told.

    Of the others the oldest go. None where nothing can be kept.
    """
    directory = below(root, "stops")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _forget_oldest(directory)
        return open_kept(directory / boot, os.O_WRONLY | os.O_APPEND, 0o640)
    except OSError:
        return None


def _forget_oldest(directory: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(directory) as files:
        stats = [(file.stat(), file.path) for file in files]
        stats.sort(key=lambda pair: pair[0].st_mtime_ns, reverse=True)
        told = [path for stat, path in stats if stat.st_size]
        untold = [path for stat, path in stats if not stat.st_size]
        for path in (*told[MAX_TOLD:], *untold[MAX_UNTOLD - 1 :]):
            os.unlink(path)


def told(root: Path) -> list[dict[str, Json]]:
    """Return a line as the ledger's, `stopped`, for every boot whose server was told to stop."""
    names = list[str]()
    with contextlib.suppress(OSError), os.scandir(below(root, "stops")) as files:
        for file in files:
            # Another boot may have it forgotten meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_size > 0:
                    names.append(file.name)
    return [{"boot": name, "event": "stopped"} for name in names]
