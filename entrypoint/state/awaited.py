"""Checkpoints that wait for their proof: what the source gave, recorded while it was served.

A directory each, by the manifest's content and our version, since another one may record otherwise,
with a file for each rank. The next load of the checkpoint is compared with it, in place
(`vllm_plugin.in_place`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from entrypoint import __version__
from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import MAX_STATE_BYTES, read_json, write_atomically, write_json
from entrypoint.state.places import below

MAX_CHECKPOINTS: Final = 16
"""Older ones go: of checkpoints that are gone since."""

_PUT_OFF: Final = "open"
"""The file that names the boot which put it off."""


class Awaited:
    """All that waits under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, content: str, ranks: Mapping[int, Json]) -> None:
        """Keep what each rank recorded; durable when this returns.

        Raises: OSError; ValueError where it is too large to be read again. Nothing waits then.
        """
        self.drop(content)
        self._make_room()
        self._path(content).mkdir(parents=True)
        for rank, recorded in ranks.items():
            path = self._rank(content, rank)
            write_json(path, recorded)
            if path.stat().st_size > MAX_STATE_BYTES:
                self.drop(content)
                raise ValueError(f"rank {rank} recorded more than {MAX_STATE_BYTES} bytes")

    def waits(self, content: str, ranks: Iterable[int]) -> bool:
        """Tell whether there is something to prove the manifest with this content by, all of it."""
        return all(os.path.exists(self._rank(content, rank)) for rank in ranks)

    def find(self, content: str, rank: int) -> Json:
        """Return what a rank recorded; None where there is nothing."""
        return read_json(self._rank(content, rank))

    def put_off(self, content: str, boot: str) -> None:
        """Remember that this boot left open what waits, which one may do. Raises: OSError."""
        if os.path.isdir(self._path(content)):
            write_atomically(self._path(content) / _PUT_OFF, boot.encode())

    def was_put_off(self, content: str, boot: str) -> bool:
        """Tell whether another boot has left it open before."""
        try:
            return (self._path(content) / _PUT_OFF).read_text(errors="replace") != boot
        except OSError:
            return False

    def drop(self, content: str) -> None:
        """Let it wait no longer; what cannot be deleted stays."""
        shutil.rmtree(self._path(content), ignore_errors=True)

    def _make_room(self) -> None:
        """Delete the oldest, each whole, so that one more is not one too many."""
        found = list(below(self.root, "awaited").glob("*"))
        found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[MAX_CHECKPOINTS - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def _path(self, content: str) -> Path:
        return below(self.root, "awaited") / f"{content}-{__version__}"

    def _rank(self, content: str, rank: int) -> Path:
        return self._path(content) / f"rank-{rank}.json"
