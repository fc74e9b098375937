"""A store that is a prefix in a bucket: S3 and what speaks like it, Google's, Azure's.

    .published/NAME            two lines: where the files lie, and the manifest as it is
    NAME/shardboot-NONCE/…     the files of one push; never written again

A name is published by one conditional put of one object, so at any instant it is absent or
complete. Object stores know no renames: that is why the files lie under a nonce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from entrypoint.checkpoint.entry import MAX_FILES, FileEntry, check_path
from entrypoint.checkpoint.finding import Complete, Damaged, Unreachable
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError, ManifestError, NotFoundError, StoreError
from entrypoint.state.memory import Memory
from entrypoint.store import published
from entrypoint.store.bucket import ASKING, READING, WRITING, Patience, asking
from entrypoint.store.published import Published

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion

    from entrypoint.store.bucket import Client
    from entrypoint.store.upload import Upload

PUBLISHED: Final = ".published"
"""No checkpoint's name begins with a dot."""

LISTING_SECONDS: Final = 30.0
"""Time for a hundred thousand objects, of which there are a thousand in an answer."""

STREAMS: Final = 16
"""So many files are read at a time; S3 gives each connection about 90 MB/s (AWS's own guide)."""

REQUEST_BYTES: Final = 32 * 1024 * 1024
"""One request asks for so much, and its answer is taken as it comes. Measured over JuiceFS's
gateway, 1 GB on 2 cores: 1.8 s, where four ranges of 3 MB at a time took 2.5 s."""

CHUNK_BYTES: Final = 1024 * 1024
"""A stream's bytes are handed on in pieces no smaller."""


class Found(NamedTuple):
    """A published name as it was when it was asked for; `version` is None where none is told."""

    published: Published
    version: UpdateVersion | None


class Stored(NamedTuple):
    """An object that lies in the store."""

    path: str
    size: int
    changed: datetime


class ObjectStore:
    """The checkpoints below a prefix. `connect` gives a client of the patience asked for."""

    def __init__(self, where: str, connect: Callable[[Patience], Client]) -> None:
        self._where, self._connect = where, connect
        self._files: dict[str, str] = {}
        self._sizes: dict[str, dict[str, int]] = {}

    @cached_property
    def asks(self) -> Client:
        """The client for small questions."""
        return self._connect(ASKING)

    @cached_property
    def reads(self) -> Client:
        """The client for the bytes of checkpoints, as they come."""
        return self._connect(READING)

    @cached_property
    def writes(self) -> Client:
        """The client for the bytes of checkpoints, on their way there."""
        return self._connect(WRITING)

    @property
    def where(self) -> str:
        """The store as messages name it."""
        return self._where

    @property
    def streams(self) -> int:
        """So many files are best read at a time."""
        return STREAMS

    def locate(self, name: str) -> str:
        """Return where a checkpoint lies, for messages and plans."""
        return f"{self.where}/{name}"

    def names(self) -> list[str]:
        """Return all published names, newest first. Raises: StoreError."""
        found = [
            (-stored.changed.timestamp(), stored.path.removeprefix(f"{PUBLISHED}/"))
            for stored in self.list(PUBLISHED)
        ]
        return [name for _, name in sorted(found) if _is_name(name)]

    def list(self, prefix: str) -> Iterator[Stored]:
        """Yield what lies below a prefix. Raises: StoreError, also for too much or too slow."""
        count, began = 0, time.monotonic()
        with asking(self.where):
            for chunk in self.asks.list(prefix, chunk_size=1000):
                count += len(chunk)
                if count > MAX_FILES or time.monotonic() - began > LISTING_SECONDS:
                    seconds = time.monotonic() - began
                    msg = f"{self.where}/{prefix}: no end after {count} objects and {seconds:.0f} s"
                    raise StoreError(msg, hint="is this the right prefix?")
                for meta in chunk:
                    yield Stored(meta["path"], meta["size"], meta["last_modified"])

    def find(self, name: str) -> Found:
        """Return what is published under a name. Raises: NotFoundError; StoreError; ManifestError.

        From here on `read` reads the files that it names.
        """
        _check_name(name)
        with asking(self.locate(name)):
            answer = self.asks.get(f"{PUBLISHED}/{name}")
            meta = answer.meta
            if meta["size"] > published.MAX_BYTES:
                msg = f"expected at most {published.MAX_BYTES} bytes, found {meta['size']}"
                raise ManifestError(msg)
            data = bytes(answer.bytes())
        found = published.decode(data)
        self._files[name] = found.files
        return Found(found, _version_of(meta))

    def read_manifest(self, name: str) -> bytes:
        """Return the bytes of a manifest, unchecked but bounded.

        Raises: NotFoundError; StoreError; ManifestError for what cannot be one.
        """
        return self.find(name).published.manifest

    def sizes(self, files: str) -> dict[str, int]:
        """Return the size of every file below a push's prefix, by its path. Raises: StoreError."""
        if files not in self._sizes:
            self._sizes[files] = {
                stored.path.removeprefix(f"{files}/"): stored.size for stored in self.list(files)
            }
        return self._sizes[files]

    def ranks(self, manifest: Manifest) -> Collection[int]:
        """Return all ranks: a push of less is refused."""
        return manifest.layout.ranks

    def check(
        self, manifest: Manifest, _: Memory, __: Collection[int]
    ) -> Complete | Damaged | Unreachable:
        """Compare the sizes of all files with the manifest."""
        try:
            wrong = self.wrong(self._where_files_lie(manifest.name), manifest)
        except (ManifestError, NotFoundError, StoreError) as error:
            return Unreachable(str(error))
        if wrong:
            return Damaged(manifest.name, wrong)
        return Complete(manifest, self.locate(manifest.name))

    def wrong(self, files: str, manifest: Manifest) -> tuple[str, ...]:
        """Return in words which files are not there, or of another size. Raises: StoreError."""
        sizes = self.sizes(files)
        return tuple(
            f"{entry.path}: missing"
            if entry.path not in sizes
            else f"{entry.path}: expected {entry.size} bytes, found {sizes[entry.path]}"
            for entry in manifest.files
            if sizes.get(entry.path) != entry.size
        )

    def read(self, name: str, entry: FileEntry, start: int = 0) -> Generator[memoryview]:
        """Yield the bytes of one file from `start`, in order, as they come.

        Raises: NotFoundError; StoreError; DamagedError when it has another size; ManifestError
        for a path that leaves the checkpoint.
        """
        check_path(entry.path, "path")
        where = f"{self.where}: {name}/{entry.path}"
        files = self._where_files_lie(name)
        size = self.sizes(files).get(entry.path)
        if size is None:
            raise NotFoundError(f"{where}: not there")
        if size != entry.size:
            raise DamagedError(f"{where}: expected {entry.size} bytes, found {size}")
        yield from self.stream(f"{files}/{entry.path}", size, where, start)

    def stream(self, path: str, size: int, where: str, start: int = 0) -> Generator[memoryview]:
        """Yield the bytes of an object of that size from `start`, as they come.

        Raises: NotFoundError; StoreError, which names `where`.
        """
        offset = start
        while offset < size:
            begin, end = offset, min(size, offset + REQUEST_BYTES)
            try:
                with asking(where):
                    answer = self.reads.get(path, options={"range": (begin, end)})
                    for piece in answer.stream(CHUNK_BYTES):
                        offset += len(piece)
                        yield memoryview(piece)
            except StoreError:
                # The client's patience counts from when it asked; on a slow line, or to a slow
                # disk, an answer takes longer, and what has come of it is as good.
                if offset - begin < CHUNK_BYTES:
                    raise
                continue
            if offset != end:
                raise StoreError(f"{where}: expected {end} bytes, found {offset}")

    def _where_files_lie(self, name: str) -> str:
        return self._files.get(name) or self.find(name).published.files

    def stage(self, name: str, _part: str | None = None) -> Upload:
        """Start building a checkpoint here. Raises: ManifestError for a name with a path in it."""
        from entrypoint.store.upload import Upload  # noqa: PLC0415 - a look builds nothing

        _check_name(name)
        return Upload(self, name)

    def retire(self, name: str) -> None:
        """Take a name away at once; its files stay until a sweep. Raises: StoreError."""
        _check_name(name)
        try:
            with asking(self.locate(name)):
                self.asks.delete(f"{PUBLISHED}/{name}")
        except NotFoundError:
            # Somebody else was faster; S3 would not have said.
            return


def _version_of(meta: ObjectMeta) -> UpdateVersion | None:
    version: UpdateVersion = {}
    if meta["e_tag"]:
        version["e_tag"] = meta["e_tag"]
    if meta["version"]:
        version["version"] = meta["version"]
    return version or None


def _check_name(name: str) -> None:
    check_path(name, "name")
    if "/" in name:
        raise ManifestError(f"{name}: a checkpoint's name has no directories")


def _is_name(name: str) -> bool:
    try:
        _check_name(name)
    except ManifestError:
        return False
    return True
