"""Servers that were told to stop, one file each: empty while nobody told them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import keep_newest

MAX_FILES: Final = 64


def open_note(root: Path, boot: str) -> int | None:
    """Return a descriptor of this boot's file: whatever is written there says that it was told.

    Of the others the oldest go. None where nothing can be kept.
    """
    directory = root / "stops"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        keep_newest(directory, "*", MAX_FILES - 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(directory / boot, flags, 0o640)
    except OSError:
        return None


def told(root: Path) -> list[dict[str, Json]]:
    """Return a line as the ledger's, `stopped`, for every boot whose server was told to stop."""
    try:
        with os.scandir(root / "stops") as files:
            names = [file.name for file in files if file.stat().st_size > 0]
    except OSError:
        return []
    return [{"boot": name, "event": "stopped"} for name in names]
