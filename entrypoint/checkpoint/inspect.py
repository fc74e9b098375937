"""Looking at a checkpoint directory: for whom is it, and are its files what it says?

A look costs one stat a file: headers are read once and remembered by the caller under
(size, mtime, inode, ctime).
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from entrypoint.checkpoint.digest import digest_file
from entrypoint.checkpoint.entry import HAVE
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.layout import SHARD_NAME
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode
from entrypoint.errors import ManifestError, SchemaError

MAX_HAVE_BYTES = 1024 * 1024

Stamp = tuple[int, int, int, int]
"""(size, mtime_ns, inode, ctime_ns): while it stands, the bytes stand."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells a file's bytes from others without reading them."""
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json`. Raises: ManifestError; SchemaError; OSError."""
    path = directory / MANIFEST
    try:
        data = read_bounded(path, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise ManifestError(str(error)) from None
    return decode_named(data, directory.name, str(path))


def decode_named(data: bytes, name: str, where: str) -> Manifest:
    """Read the manifest of the checkpoint `name`. Raises: ManifestError; SchemaError."""
    try:
        manifest = decode(data)
    except SchemaError:
        raise
    except ManifestError as error:
        msg = f"{where}: {error}"
        raise ManifestError(msg, hint=error.hint) from None
    if manifest.name != name:
        msg = f"{where}: made for the name {manifest.name!r}"
        raise ManifestError(msg, hint="a checkpoint keeps the name it was published under")
    return manifest


def ranks_held(directory: Path) -> set[int] | None:
    """Return the ranks that `have.json` names, None where there is none: all ranks.

    One that cannot be read names nobody.
    """
    path = f"{directory}/{HAVE}"
    if not os.path.lexists(path):
        return None
    try:
        document = json.loads(read_bounded(Path(path), MAX_HAVE_BYTES))
    except (OSError, ValueError, RecursionError):
        return set()
    ranks = document.get("ranks") if isinstance(document, dict) else None
    return {r for r in ranks if type(r) is int} if isinstance(ranks, list) else set()


def ranks_in(directory: Path, manifest: Manifest) -> Collection[int]:
    """Return those of the manifest's ranks whose files a published checkpoint holds."""
    held, every = ranks_held(directory), manifest.layout.ranks
    return every if held is None else held & set(every)


def nobody_waits() -> None:
    """Hear that a look goes on, where nobody waits for that."""


class Examination(NamedTuple):
    """What one look found: `discrepancies` in words, and the stamps of all files looked at."""

    discrepancies: tuple[str, ...]
    stamps: Mapping[str, Stamp]


def examine(
    directory: Path,
    manifest: Manifest,
    ranks: Iterable[int],
    known: Mapping[str, Stamp],
    alive: Callable[[], None] = nobody_waits,
) -> Examination:
    """Compare what is on disk for `ranks` with the manifest, by sizes and headers.

    `alive` is called for each file. Headers, the index and stray shard files are looked at only
    where `known` stamps moved. Nothing is changed.
    Raises: OSError when the directory itself cannot be looked at.
    """
    entries = manifest.files_for(ranks)
    stamps: dict[str, Stamp] = {}
    wrong: list[str] = []
    for entry in entries:
        alive()
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
        from entrypoint.checkpoint.structure import structure  # noqa: PLC0415 - a hit needs it not

        wrong += _strays(directory, manifest)
        wrong += structure(directory, entries, alive)
    return Examination(tuple(wrong), stamps)


def _strays(directory: Path, manifest: Manifest) -> list[str]:
    listed = {entry.path for entry in manifest.files}
    return [
        f"{name}: a shard file that the manifest does not list"
        for name in sorted(os.listdir(directory))
        if SHARD_NAME.fullmatch(name) and name not in listed
    ]


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
