"""The global index, `index.json`: every tensor, per rank, and where its bytes are. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.errors import ManifestError

MAX_INDEX_BYTES = 512 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""What the safetensors format itself allows for a header."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One rank's tensor: rank-local shape, safetensors dtype word, [begin, end) in the file."""

    name: str
    rank: int
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode(tensors: Iterable[TensorEntry]) -> bytes:
    """Return the bytes of `index.json`: canonical JSON, tensors by name, ranks in order."""
    by_name: dict[str, list[Json]] = {}
    for t in sorted(tensors, key=lambda t: (t.name, t.rank)):
        by_name.setdefault(t.name, []).append(
            {
                "rank": t.rank,
                "file": t.file,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "bytes": [t.begin, t.end],
            }
        )
    return canonical({"schema": 1, "tensors": cast("Json", by_name)}) + b"\n"


def decode(data: bytes) -> tuple[TensorEntry, ...]:
    """Read `index.json`, whose bytes have been verified against the manifest.

    Raises: ManifestError when they are not what `encode` writes.
    """
    try:
        document = json.loads(data)
        return tuple(
            TensorEntry(
                name=name,
                rank=int(entry["rank"]),
                file=str(entry["file"]),
                dtype=str(entry["dtype"]),
                shape=tuple(int(n) for n in entry["shape"]),
                begin=int(entry["bytes"][0]),
                end=int(entry["bytes"][1]),
            )
            for name, entries in document["tensors"].items()
            for entry in entries
        )
    except MALFORMED as error:
        msg = f"index.json: not an index of schema 1: {str(error)[:120]}"
        raise ManifestError(msg) from None


def by_file(tensors: Iterable[TensorEntry]) -> Mapping[str, dict[str, TensorEntry]]:
    """Group an index by shard file, then by tensor name."""
    files: dict[str, dict[str, TensorEntry]] = {}
    for tensor in tensors:
        files.setdefault(tensor.file, {})[tensor.name] = tensor
    return files
