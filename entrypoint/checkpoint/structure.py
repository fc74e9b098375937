"""Whether headers, index and manifest of a checkpoint tell the same story."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from entrypoint.checkpoint import header, index
from entrypoint.checkpoint.digest import digest_bytes, digest_file
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import MAX_INDEX_BYTES, TensorEntry
from entrypoint.errors import DamagedError, ManifestError


def structure(
    directory: Path, entries: Iterable[FileEntry], alive: Callable[[], None]
) -> list[str]:
    """Compare the index with the manifest, and every header with the index; say what differs.

    Reads the index, one header a shard file, and the model's other files in full; `alive` is
    called for each.
    """
    by_path = {entry.path: entry for entry in entries}
    if INDEX not in by_path:
        return [f"{INDEX}: not listed in the manifest"]
    try:
        tensors = index.by_file(_read_index(directory, by_path[INDEX]))
        for entry in by_path.values():
            alive()
            if entry.role == "model" and digest_file(directory / entry.path) != entry.blake3:
                # Small, and vLLM believes every word of them.
                return [f"{entry.path}: BLAKE3 is not the one in the manifest"]
            if entry.role == "weights":
                _match(directory / entry.path, tensors.get(entry.path, {}), entry)
    except (DamagedError, ManifestError, ValueError) as error:
        return [str(error)]
    return []


def _read_index(directory: Path, entry: FileEntry) -> tuple[TensorEntry, ...]:
    data = read_bounded(directory / INDEX, MAX_INDEX_BYTES)
    if digest_bytes(data) != entry.blake3:
        msg = f"{directory / INDEX}: BLAKE3 is not the one in the manifest"
        raise DamagedError(msg)
    return index.decode(data)


def _match(path: Path, wanted: Mapping[str, TensorEntry], entry: FileEntry) -> None:
    found = header.read(path)
    expected = {name: header.Slice(t.dtype, t.shape, t.begin, t.end) for name, t in wanted.items()}
    if len(found) != entry.tensors or found != expected:
        odd = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        msg = f"{path}: header and index disagree on {', '.join(odd[:3]) or 'their number'}"
        raise DamagedError(msg)
