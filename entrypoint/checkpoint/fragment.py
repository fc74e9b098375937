"""What one rank says of the files it has written, and how all of them become a manifest. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrypoint.checkpoint import index
from entrypoint.checkpoint.digest import Json, canonical, digest_bytes
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import checkpoint_name, layout_of
from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.errors import SaveError


def fragment_name(rank: int) -> str:
    """Return the name of a rank's fragment in staging; hidden, so never part of a checkpoint."""
    return f".rank-{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One rank's part of the manifest, written after its files were fsynced."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    decisions: Mapping[str, bool]
    seconds: float

    def encode(self) -> bytes:
        """Return the bytes of the fragment file."""
        files: list[Json] = [entry.to_json() for entry in self.files]
        tensors: list[Json] = [
            [t.name, t.file, t.dtype, list(t.shape), t.begin, t.end] for t in self.tensors
        ]
        return canonical(
            {
                "rank": self.rank,
                "files": files,
                "tensors": tensors,
                "decisions": dict(self.decisions),
                "seconds": round(self.seconds, 3),
            }
        )


def decode(data: bytes) -> Fragment:
    """Read a fragment that our own save child wrote. Raises: SaveError."""
    try:
        document: dict[str, Any] = json.loads(data)
        rank = int(document["rank"])
        return Fragment(
            rank=rank,
            files=tuple(FileEntry(**entry) for entry in document["files"]),
            tensors=tuple(
                TensorEntry(name, rank, file, dtype, tuple(shape), begin, end)
                for name, file, dtype, shape, begin, end in document["tensors"]
            ),
            decisions=document["decisions"],
            seconds=float(document["seconds"]),
        )
    except MALFORMED as error:
        msg = f"a rank's fragment cannot be read: {error}"
        raise SaveError(msg) from None


def assemble(
    fragments: Sequence[Fragment],
    model_files: Sequence[FileEntry],
    key: Key,
    source: Source,
    save: Mapping[str, Json],
    created_at: str,
) -> tuple[Manifest, bytes]:
    """Merge the fragments of all ranks; return the manifest and the bytes of `index.json`.

    Raises: SaveError when a rank is missing, or ranks decided differently.
    """
    layout = layout_of(key)
    found = sorted(fragment.rank for fragment in fragments)
    if found != list(layout.ranks):
        msg = f"the save wrote ranks {found}, expected {list(layout.ranks)}"
        raise SaveError(msg)
    decisions = fragments[0].decisions
    if any(fragment.decisions != decisions for fragment in fragments):
        msg = f"ranks decided differently: {[dict(f.decisions) for f in fragments]}"
        raise SaveError(msg)
    index_bytes = index.encode(t for fragment in fragments for t in fragment.tensors)
    index_entry = FileEntry(
        path=INDEX, size=len(index_bytes), blake3=digest_bytes(index_bytes), role="index"
    )
    weights = [entry for fragment in fragments for entry in fragment.files]
    manifest = Manifest(
        name=checkpoint_name(source.name, key),
        key=key,
        source=source,
        layout=layout,
        files=(*weights, *model_files, index_entry),
        decisions=decisions,
        proof=None,
        save=save,
        created_at=created_at,
    )
    return manifest, index_bytes
