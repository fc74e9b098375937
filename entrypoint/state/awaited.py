"""Checkpoints that wait for their proof: what the source gave, recorded while it was served.

A file a rank, by the manifest's content and our version, since another one may record otherwise.
The next load of the checkpoint is compared with it, in place (`vllm_plugin.in_place`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from entrypoint import __version__
from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import keep_newest, read_json, write_atomically, write_json

MAX_FILES: Final = 256
"""Older ones go: of checkpoints that are proved, rejected or gone since."""


class Awaited:
    """All that waits under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, content: str, ranks: Mapping[int, Json]) -> None:
        """Keep what each rank recorded; durable when this returns. Raises: OSError."""
        directory = self._path(content, "").parent
        directory.mkdir(parents=True, exist_ok=True)
        keep_newest(directory, "*", max(0, MAX_FILES - len(ranks)))
        # By the first rank's file it is known: that one comes last.
        for rank in sorted(ranks, reverse=True):
            write_json(self._path(content, f"rank-{rank}.json"), ranks[rank])

    def waits(self, content: str) -> bool:
        """Tell whether there is something to prove the manifest with this content by."""
        return self._path(content, "rank-0.json").exists()

    def find(self, content: str, rank: int) -> Json:
        """Return what a rank recorded; None where there is nothing."""
        return read_json(self._path(content, f"rank-{rank}.json"))

    def put_off(self, content: str) -> None:
        """Remember that a load left it open, which it may do once. Raises: OSError."""
        write_atomically(self._path(content, "open"), b"")

    def was_put_off(self, content: str) -> bool:
        """Tell whether a load before has left it open."""
        return self._path(content, "open").exists()

    def _path(self, content: str, what: str) -> Path:
        return self.root / "awaited" / f"{content}-{__version__}-{what}"
