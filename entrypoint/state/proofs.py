"""Proofs made here of checkpoints that came without one, by their manifest's content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import read_json, write_json
from entrypoint.state.places import below


class Proofs:
    """All proofs under `root`; what a save proved stands in its manifest instead."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, digest: str) -> Mapping[str, Json] | None:
        """Return the proof of the manifest with this digest, or None."""
        entry = read_json(self._path(digest))
        return entry if isinstance(entry, dict) else None

    def add(self, digest: str, proof: Mapping[str, Json]) -> None:
        """Keep a proof; durable when this returns. Raises: OSError."""
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(proof), 0o644)

    def _path(self, digest: str) -> Path:
        return below(self.root, "proofs") / f"{digest}.json"
