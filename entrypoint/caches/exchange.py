"""Caches put beside a checkpoint in the shared store, and fetched from there.

They are code: whoever may write into that store decides what this node runs. So they are fetched
only where the operator trusts the store, and then only for this very checkpoint, platform and path,
whole, and never over caches that are here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, NamedTuple

from blake3 import blake3

from entrypoint.caches import archive
from entrypoint.caches.label import MAX_LABEL_BYTES, Label, decode
from entrypoint.caches.place import CHECKPOINT, MODE, platform_of
from entrypoint.caches.shelf import Shelf
from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.errors import (
    DamagedError,
    KeyMismatchError,
    ManifestError,
    NotFoundError,
    StagingError,
)
from entrypoint.model.bounded import Alive
from entrypoint.store import space, staging, tree, writeback

FILE_MODE = 0o600
ARCHIVE = ".archive"


class Wanted(NamedTuple):
    """Whose caches: the checkpoint's name in the shared store, its key's digest, and its path here.

    vLLM finds what it has compiled by the path of the model.
    """

    checkpoint: str
    key: str
    path: str


def publish(place: Path, wanted: Wanted, shelf: Shelf, most_bytes: int) -> str:
    """Put the caches in `place` on a shelf, and return in words what came of it.

    Readers find those of before or these, whole. What these replace goes.
    Raises: SpaceError where they are more than `most_bytes`; StoreError; StagingError.
    """
    with tempfile.TemporaryFile() as file:
        try:
            packed = archive.pack(place, file, most_bytes)
        except OSError as error:
            raise StagingError(f"{place}: {error.strerror or error}") from None
        if not packed.entries:
            return "none to publish yet"
        platform = platform_of(place.name)
        name = f"{wanted.checkpoint}-{platform}"
        label = Label(
            checkpoint=wanted.checkpoint,
            key=wanted.key,
            platform=platform,
            path=wanted.path,
            archive=f"{name}-{packed.blake3[:16]}.tar",
            size=packed.size,
            blake3=packed.blake3,
            entries=packed.entries,
            unpacked=packed.unpacked,
        )
        before = _label(shelf, name)
        if before == label:
            return "published already"
        shelf.put(label.archive, label.size, _pieces(file))
        data = label.encode()
        shelf.put(f"{name}.json", len(data), [memoryview(data)])
    if before is not None and before.archive.startswith(f"{name}-"):
        with contextlib.suppress(NotFoundError):
            shelf.remove(before.archive)
    return f"published, {packed.entries} files of {packed.unpacked} bytes"


def _label(shelf: Shelf, name: str) -> Label | None:
    try:
        return decode(shelf.read(f"{name}.json", MAX_LABEL_BYTES))
    except (NotFoundError, ManifestError):
        return None


def _pieces(file: IO[bytes]) -> Generator[memoryview]:
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        yield memoryview(piece)


def fetch(
    place: Path,
    wanted: Wanted,
    shelf: Shelf,
    most_bytes: int,
    reserve: int,
    alive: Alive = lambda: None,
) -> str:
    """Make `place` from what a shelf has for just this; return in words what came of it.

    It appears whole or not at all, and never where something is. On error nothing stays. `alive` is
    called with every piece.
    Raises: NotFoundError where the shelf has none; KeyMismatchError where they are for something
    else; ManifestError and DamagedError for what is not what it must be; SpaceError; StagingError;
    StoreError.
    """
    name = f"{wanted.checkpoint}-{platform_of(place.name)}.json"
    label = decode(shelf.read(name, MAX_LABEL_BYTES))
    _require(label, wanted, place)
    if max(label.size, label.unpacked) > most_bytes:
        raise DamagedError(f"{label.archive}: larger than {most_bytes} bytes")
    root = place.parent
    try:
        root.mkdir(MODE, exist_ok=True)
    except OSError as error:
        raise StagingError(f"{root}: {error.strerror}") from None
    space.require_room(root, label.size + label.unpacked, space.Limits(reserve))
    with staging.begin(root, place.name, dir_mode=MODE, file_mode=FILE_MODE) as built:
        _copy(shelf, label, built, alive)
        archive.unpack(built.path / ARCHIVE, built, label.entries, label.unpacked, alive)
        with built.writing(CHECKPOINT):
            (built.path / ARCHIVE).unlink()
        built.write_file(CHECKPOINT, os.fsencode(wanted.path))
        writeback.settle(root)
        with built.writing(""):
            built.path.rename(place)
            tree.sync_directory(root)
    return f"fetched, {label.entries} files of {label.unpacked} bytes"


def _require(label: Label, wanted: Wanted, place: Path) -> None:
    platform = platform_of(place.name)
    for field, want, found in (
        ("checkpoint", wanted.checkpoint, label.checkpoint),
        ("key", wanted.key, label.key),
        ("platform", platform, label.platform),
        ("path", wanted.path, label.path),
    ):
        if want != found:
            raise KeyMismatchError(f"{field}: expected {want}, found {found}")


def _copy(shelf: Shelf, label: Label, built: staging.Staging, alive: Alive) -> None:
    """Write the archive into staging. Raises: DamagedError unless it is what the label says."""
    hasher, size = blake3(), 0
    with open(built.create(ARCHIVE), "wb", buffering=0) as file:
        for piece in shelf.stream(label.archive, label.size):
            alive()
            hasher.update(piece)
            size += len(piece)
            with built.writing(ARCHIVE):
                tree.write_all(file.fileno(), piece)
    if (size, hasher.hexdigest()) != (label.size, label.blake3):
        raise DamagedError(f"{label.archive}: not the bytes that its label tells of")
