"""Caches as one file: a tar of regular files by their relative paths, and of nothing else.

What comes from elsewhere is foreign data: the archive's bytes are what its label says before any of
them is looked at, and then no path escapes, no link or device is made, and nothing is written over.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from blake3 import blake3

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.checkpoint.entry import check_path
from entrypoint.errors import DamagedError, ManifestError, SpaceError
from entrypoint.model.bounded import Alive
from entrypoint.store import tree
from entrypoint.store.staging import Staging

MOST_ENTRIES: Final = 20_000

_TRANSIENT: Final = (".lock", ".tmp")

_GARBLED: Final = (ValueError, OverflowError, RecursionError)
"""What tarfile itself raises for extended headers with anything in them, or thousands in a row."""


class Packed(NamedTuple):
    """An archive: its bytes and their digest, and how many files of how many bytes it holds."""

    size: int
    blake3: str
    entries: int
    unpacked: int


class _Hashing:
    """A file to write to that keeps a digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hasher, self.size = file, blake3(), 0

    def write(self, data: bytes) -> int:
        self.hasher.update(data)
        self.size += len(data)
        return self.file.write(data)


def pack(place: Path, file: IO[bytes], most_bytes: int) -> Packed:
    """Write all caches in `place` to `file`; the same ones give the same bytes.

    Locks, what a compiler is just writing, and what is empty stay behind.
    Raises: OSError; SpaceError where they are more than `most_bytes`, or too many files.
    """
    out = _Hashing(file)
    entries = unpacked = 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for path in _files(place):
            with contextlib.suppress(FileNotFoundError), (place / path).open("rb") as source:
                info = tarfile.TarInfo(path)
                info.size = os.fstat(source.fileno()).st_size
                entries, unpacked = entries + 1, unpacked + info.size
                if entries > MOST_ENTRIES or unpacked > most_bytes:
                    raise SpaceError(
                        f"{place}: more than {MOST_ENTRIES} files or {most_bytes} bytes",
                        hint="raise --cache-bytes",
                    )
                archive.addfile(info, source)
    return Packed(out.size, str(out.hasher.hexdigest()), entries, unpacked)


def _files(place: Path) -> Iterator[str]:
    """Yield what is worth packing, in an order that lasts. Raises: OSError."""
    for path, status in sorted(tree.files_beneath(place), key=lambda found: found[0]):
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            continue
        if path.endswith(_TRANSIENT):
            continue
        with contextlib.suppress(ManifestError):
            check_path(path, "path")
            yield path


def unpack(
    archive: Path, staging: Staging, entries: int, unpacked: int, alive: Alive = lambda: None
) -> None:
    """Write the files of an archive into `staging`: just so many, of so many bytes together.

    `alive` is called for each.
    Raises: DamagedError for anything that `pack` would not have made; StagingError; SpaceError.
    """
    count = size = 0
    try:
        with staging.writing(archive.name), tarfile.open(archive, mode="r:") as tar:
            for info in tar:
                alive()
                count, size = count + 1, size + info.size
                if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise DamagedError(f"{info.name[:120]!r}: no regular file")
                if count > min(entries, MOST_ENTRIES) or size > unpacked:
                    raise DamagedError(f"more than {entries} files or {unpacked} bytes")
                check_path(info.name, "path")
                _write(tar, info, staging)
    except (tarfile.TarError, ManifestError, *_GARBLED) as error:
        raise DamagedError(f"no archive of caches: {error}") from None
    if (count, size) != (entries, unpacked):
        found = f"{count} of {size} bytes"
        raise DamagedError(f"expected {entries} files of {unpacked} bytes, found {found}")


def _write(tar: tarfile.TarFile, info: tarfile.TarInfo, staging: Staging) -> None:
    source = tar.extractfile(info)
    if source is None:
        raise DamagedError(f"{info.name[:120]!r}: no regular file")
    descriptor = staging.create(info.name)
    left = info.size
    try:
        while left:
            piece = source.read(min(left, PIECE_BYTES))
            if not piece:
                raise DamagedError(f"{info.name[:120]!r}: ends too early")
            with staging.writing(info.name):
                tree.write_all(descriptor, piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
