"""Looking at a checkpoint directory: for whom is it, and are its files what it says?

A look costs one stat a file: headers are read once and remembered by the caller under
(size, mtime, inode, ctime).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.checkpoint import header, index
from entrypoint.checkpoint.digest import digest_bytes, digest_file
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import MAX_INDEX_BYTES, TensorEntry
from entrypoint.checkpoint.layout import SHARD_NAME
from entrypoint.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    decode,
)
from entrypoint.errors import DamagedError, ManifestError

Stamp = tuple[int, int, int, int]
"""(size, mtime_ns, inode, ctime_ns): while it stands, the bytes stand."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells a file's bytes from others without reading them."""
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json`. Raises: ManifestError; OSError."""
    path = directory / MANIFEST
    try:
        manifest = decode(read_bounded(path, MAX_MANIFEST_BYTES))
    except (ValueError, ManifestError) as error:
        msg = f"{path}: {error}"
        raise ManifestError(msg, hint=getattr(error, "hint", "")) from None
    if manifest.name != directory.name:
        msg = f"{path}: made for the name {manifest.name!r}"
        raise ManifestError(msg, hint="a checkpoint keeps the name it was published under")
    return manifest


@dataclass(frozen=True, slots=True)
class Examination:
    """What one look found: `discrepancies` in words, and the stamps of all files looked at."""

    discrepancies: tuple[str, ...]
    stamps: Mapping[str, Stamp]


def examine(
    directory: Path,
    manifest: Manifest,
    ranks: Iterable[int],
    known: Mapping[str, Stamp],
) -> Examination:
    """Compare what is on disk for `ranks` with the manifest, by sizes and headers.

    Headers, the index and stray shard files are looked at only where `known` stamps moved.
    Nothing is changed. Raises: OSError when the directory itself cannot be looked at.
    """
    entries = manifest.files_for(ranks)
    stamps: dict[str, Stamp] = {}
    wrong: list[str] = []
    for entry in entries:
        try:
            # Strings, not Path objects: this runs once a file on every boot.
            status = os.lstat(f"{directory}/{entry.path}")
        except (FileNotFoundError, NotADirectoryError):
            wrong.append(f"{entry.path}: missing")
            continue
        if not stat.S_ISREG(status.st_mode):
            wrong.append(f"{entry.path}: expected a regular file")
        elif status.st_size != entry.size:
            wrong.append(f"{entry.path}: expected {entry.size} bytes, found {status.st_size}")
        stamps[entry.path] = stamp_of(status)
    stamps["."] = stamp_of(directory.stat())
    if not wrong and stamps != known:
        wrong += _strays(directory, manifest)
        wrong += _structure(directory, entries)
    return Examination(tuple(wrong), stamps)


def _strays(directory: Path, manifest: Manifest) -> list[str]:
    listed = {entry.path for entry in manifest.files}
    return [
        f"{name}: a shard file that the manifest does not list"
        for name in sorted(os.listdir(directory))
        if SHARD_NAME.fullmatch(name) and name not in listed
    ]


def _structure(directory: Path, entries: Iterable[FileEntry]) -> list[str]:
    by_path = {entry.path: entry for entry in entries}
    if INDEX not in by_path:
        return [f"{INDEX}: not listed in the manifest"]
    try:
        tensors = index.by_file(_read_index(directory, by_path[INDEX]))
        for entry in by_path.values():
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


def verify_deep(
    directory: Path,
    manifest: Manifest,
    ranks: Iterable[int],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> tuple[str, ...]:
    """Read every byte for `ranks` against the manifest's BLAKE3; return discrepancies in words."""
    shallow = examine(directory, manifest, ranks, known={})
    if shallow.discrepancies:
        return shallow.discrepancies
    return tuple(
        f"{entry.path}: BLAKE3 is not the one in the manifest"
        for entry in manifest.files_for(ranks)
        if digest_file(directory / entry.path, on_bytes) != entry.blake3
    )
