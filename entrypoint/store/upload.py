"""Staging in an object store: a prefix of its own, and the one put that publishes it.

Putting is conditional (if-none-match), and what is there is looked at before and afterwards: a
store that ignores conditions publishes one of two racers just the same. Files are deleted only
where nothing can name them any more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from entrypoint.checkpoint.entry import FileEntry, check_path
from entrypoint.checkpoint.layout import generation_of, with_generation
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import (
    Interrupted,
    ManifestError,
    NotFoundError,
    ShardbootError,
    StagingError,
    StoreError,
)
from entrypoint.store import published
from entrypoint.store.bucket import asking
from entrypoint.store.objects import PUBLISHED, Found, ObjectStore
from entrypoint.store.publish import CommitResult
from entrypoint.store.published import Published

if TYPE_CHECKING:
    from obstore import PutMode, WritableFile

PART_BYTES: Final = 8 * 1024 * 1024
PARTS_AT_ONCE: Final = 2
"""Of one file; as many files are written at a time as the source is read in `streams`."""

_MOST_PARTS = 9000
"""S3 takes 10000."""

_LOOKS = 4
"""A name can be taken and given up by others while we look; this often is enough."""


class Upload:
    """One checkpoint being pushed. Leaving the `with` block uncommitted deletes its files.

    A signal does not: whoever sent it waits seconds, a store that is slow to delete needs minutes.
    `gc --shared` takes them later.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store = store
        self.files = f"{name}/shardboot-{os.urandom(8).hex()}"
        self.held_bytes = 0
        self._may_be_named = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._may_be_named and not isinstance(error, Interrupted):
            # What cannot be deleted now is left to a sweep.
            with contextlib.suppress(ShardbootError):
                delete(self.store, self.files)

    def room_taken(self, _: Iterable[FileEntry]) -> int:
        """Return 0: a bucket has room."""
        return 0

    def held(self, _: FileEntry) -> Generator[memoryview]:
        """Yield nothing: parts that were never put together are not read again."""
        yield from ()

    def drop(self, _: FileEntry) -> None:
        """Forget nothing."""

    def write(
        self,
        entry: FileEntry,
        pieces: Iterable[memoryview],
        _missing: int | None = None,
        _start: int = 0,
    ) -> None:
        """Put a file in parts; it is there, whole, on return, or not at all.

        Raises: StoreError; StagingError for another size; ManifestError for a path that leaves
        the checkpoint; what `pieces` raises.
        """
        check_path(entry.path, "path")
        put(self.store, f"{self.files}/{entry.path}", entry.size, pieces)

    def commit(self, manifest: Manifest, ranks: Collection[int] | None = None) -> CommitResult:
        """Publish what was pushed; `ranks` must be all of them.

        On return a complete checkpoint is published, under the manifest's name or a later
        generation of it. On error nothing is, but where the store did not say how the last put
        ended: then it is complete, or not there.
        Raises: StagingError; StoreError.
        """
        if ranks is not None and set(ranks) != set(manifest.layout.ranks):
            raise StagingError(f"{self.store.where}: an object store holds all ranks or none")
        self._check(manifest)
        base, first = generation_of(manifest.name)
        for generation in itertools.count(first):
            candidate = manifest.renamed(with_generation(base, generation))
            outcome = self._claim(candidate)
            if outcome is not None:
                return CommitResult(candidate.name, outcome)
        raise AssertionError  # pragma: no cover - count() does not end

    def _check(self, manifest: Manifest) -> None:
        wrong = self.store.wrong(self.files, manifest)
        listed = {entry.path for entry in manifest.files}
        strays = sorted(self.store.sizes(self.files).keys() - listed)
        for text in (*wrong, *(f"{path}: not in the manifest" for path in strays)):
            raise StagingError(f"{self.store.where}/{self.files}/{text}")

    def _claim(self, candidate: Manifest) -> Literal["committed", "existed"] | None:
        """Publish `candidate` unless its name is taken; None when it is, by something else."""
        failure: StoreError | None = None
        for _ in range(_LOOKS):
            standing = self._standing(candidate.name)
            if standing == "other":
                return None
            if standing is None:
                failure = self._put(candidate, "create")
            elif standing.published.files == self.files:
                self._may_be_named = True
                return "committed"
            elif standing.published.manifest != candidate.encode():
                return None
            elif not self.store.wrong(standing.published.files, candidate):
                return "existed"
            else:
                # Its readers keep the files that are there; these are the same bytes, whole.
                failure = self._put(candidate, standing.version or "overwrite")
        where = self.store.locate(candidate.name)
        raise failure or StagingError(f"{where}: the name is taken and given up without end")

    def _standing(self, name: str) -> Found | Literal["other"] | None:
        try:
            return self.store.find(name)
        except NotFoundError:
            return None
        except ManifestError:
            return "other"

    def _put(self, candidate: Manifest, mode: PutMode) -> StoreError | None:
        """Try to publish; the next look tells what came of it. Return why that is not known."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        data = Published(self.files, candidate.encode()).encode()
        if len(data) > published.MAX_BYTES:
            raise StagingError(f"{candidate.name}: its manifest is too large")
        before, self._may_be_named = self._may_be_named, True
        try:
            with asking(self.store.locate(candidate.name)):
                try:
                    self.store.asks.put(f"{PUBLISHED}/{candidate.name}", data, mode=mode)
                except (AlreadyExistsError, PreconditionError):
                    # Said for certain: this put names nothing, now or later.
                    self._may_be_named = before
        except StoreError as error:
            return error
        return None


def put(store: ObjectStore, path: str, size: int, pieces: Iterable[memoryview]) -> None:
    """Put an object in parts; it is there, whole, on return, or not at all.

    Raises: StoreError; StagingError for another size; what `pieces` raises.
    """
    from obstore import open_writer  # noqa: PLC0415 - an extra

    where = f"{store.where}: {path}"
    with asking(where):
        writer = open_writer(
            store.writes,
            path,
            buffer_size=max(PART_BYTES, -(-size // _MOST_PARTS)),
            max_concurrency=PARTS_AT_ONCE,
        )
    try:
        _fill(writer, size, pieces, where)
    except BaseException as error:
        # Whatever went wrong before matters more than that the parts cannot be taken back.
        with contextlib.suppress(ShardbootError), asking(where):
            writer.__exit__(type(error), error, None)
        raise


def _fill(writer: WritableFile, size: int, pieces: Iterable[memoryview], where: str) -> None:
    count = 0
    for piece in pieces:
        with asking(where):
            # A copy: the client sends it later, when the piece is another one.
            writer.write(bytes(piece))
        count += len(piece)
    if count != size:
        raise StagingError(f"{where}: expected {size} bytes, found {count}")
    with asking(where):
        writer.close()


def delete(store: ObjectStore, files: str) -> None:
    """Delete everything below a push's prefix. Raises: StoreError."""
    paths = [stored.path for stored in store.list(files)]
    if paths:
        with asking(store.where):
            store.asks.delete(paths)
