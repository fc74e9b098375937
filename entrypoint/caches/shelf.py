"""Small and large files beside the checkpoints of a shared store, by name.

.caches/NAME-PLATFORM.json          a label, exchanged in one step
.caches/NAME-PLATFORM-DIGEST.tar    the archive that it names; its bytes never change
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.errors import ManifestError, NotFoundError, StagingError, StoreError
from entrypoint.store import pieces, tree
from entrypoint.store.base import CheckpointStore
from entrypoint.store.bucket import asking
from entrypoint.store.directory import DirectoryStore

if TYPE_CHECKING:
    from entrypoint.store.objects import ObjectStore

SHELF: Final = ".caches"


class Stored(NamedTuple):
    """When a file was put there, in seconds since 1970, and its bytes."""

    changed: float
    size: int


class Shelf(Protocol):
    """Files beside the checkpoints. All raise StoreError, and NotFoundError where there is none."""

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file. Raises: ManifestError where it is larger than `limit`."""
        ...

    def stream(self, name: str, size: int) -> Generator[memoryview]:
        """Yield the bytes of a file of that size; a piece is good until the next is asked for."""
        ...

    def put(self, name: str, size: int, data: Iterable[memoryview]) -> None:
        """Put a file there, whole or not at all, in the place of another if there is one."""
        ...

    def names(self) -> dict[str, Stored]:
        """Return all files by their names."""
        ...

    def remove(self, name: str) -> None:
        """Take a file away."""
        ...


def shelf_of(store: CheckpointStore) -> Shelf:
    """Return the shelf of a store; nothing is touched yet."""
    if isinstance(store, DirectoryStore):
        return DirectoryShelf(store)
    return BucketShelf(cast("ObjectStore", store))


class DirectoryShelf:
    """A hidden directory of a store that is one."""

    def __init__(self, store: DirectoryStore) -> None:
        self.store, self.root = store, store.root / SHELF

    def read(self, name: str, limit: int) -> bytes:
        try:
            return read_bounded(self.root / name, limit)
        except ValueError as error:
            raise ManifestError(str(error)) from None
        except OSError as error:
            raise _failure(error, self.root / name) from error

    def stream(self, name: str, size: int) -> Generator[memoryview]:
        return pieces.read(lambda: self._open(name), size, str(self.root / name))

    def _open(self, name: str) -> int:
        try:
            root = os.open(self.root, tree.DIRECTORY)
            try:
                return tree.open_regular(root, name)
            finally:
                os.close(root)
        except OSError as error:
            raise _failure(error, self.root / name) from error

    def put(self, name: str, size: int, data: Iterable[memoryview]) -> None:
        temporary = self.root / f".{name[:200]}.{os.urandom(4).hex()}"
        try:
            tree.make_hidden(self.store.root, SHELF, self.store.dir_mode)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
            try:
                self._fill(descriptor, size, data)
                temporary.rename(self.root / name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            tree.sync_directory(self.root)
        except OSError as error:
            raise _failure(error, self.root / name) from error

    def _fill(self, descriptor: int, size: int, data: Iterable[memoryview]) -> None:
        count = 0
        for piece in data:
            tree.write_all(descriptor, piece)
            count += len(piece)
        if count != size:
            raise StagingError(f"{self.root}: expected {size} bytes, found {count}")
        tree.set_mode(descriptor, self.store.file_mode)
        os.fsync(descriptor)

    def names(self) -> dict[str, Stored]:
        try:
            with os.scandir(self.root) as entries:
                found = [(each.name, each.stat(follow_symlinks=False)) for each in entries]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _failure(error, self.root) from error
        return {name: Stored(status.st_mtime, status.st_size) for name, status in found}

    def remove(self, name: str) -> None:
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise _failure(error, self.root / name) from error


def _failure(error: OSError, path: Path) -> StoreError | NotFoundError:
    kind = NotFoundError if isinstance(error, FileNotFoundError) else StoreError
    return kind(f"{path}: {error.strerror or error}")


class BucketShelf:
    """A prefix of a bucket, beside the published names."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def read(self, name: str, limit: int) -> bytes:
        path = f"{SHELF}/{name}"
        with asking(self.store.locate(path)):
            answer = self.store.asks.get(path)
            if answer.meta["size"] > limit:
                raise ManifestError(f"{self.store.locate(path)}: larger than {limit} bytes")
            return bytes(answer.bytes())

    def stream(self, name: str, size: int) -> Generator[memoryview]:
        path = f"{SHELF}/{name}"
        return self.store.stream(path, size, self.store.locate(path))

    def put(self, name: str, size: int, data: Iterable[memoryview]) -> None:
        from entrypoint.store.upload import put  # noqa: PLC0415 - a look puts nothing

        put(self.store, f"{SHELF}/{name}", size, data)

    def names(self) -> dict[str, Stored]:
        return {
            each.path.removeprefix(f"{SHELF}/"): Stored(each.changed.timestamp(), each.size)
            for each in self.store.list(SHELF)
        }

    def remove(self, name: str) -> None:
        with asking(self.store.locate(f"{SHELF}/{name}")):
            self.store.asks.delete([f"{SHELF}/{name}"])
