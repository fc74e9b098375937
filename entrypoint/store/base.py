"""What every store can do, and how a setting names one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from entrypoint.errors import ConfigError
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.tree import DIR_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable
    from types import TracebackType
    from typing import Self

    from entrypoint.checkpoint.entry import FileEntry
    from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Unreachable
    from entrypoint.checkpoint.manifest import Manifest
    from entrypoint.state.memory import Memory
    from entrypoint.store.objects import ObjectStore
    from entrypoint.store.publish import CommitResult


SCHEMES: Final = ("s3", "gs", "az")
"""Of the URLs that name a bucket."""


class CheckpointStore(Protocol):
    """Moves a checkpoint's bytes under a name, and knows nothing of what they mean.

    So small that a directory, an object store and a test can all be one. A reader calls `names`,
    `read_manifest`, `check`, then `read` for each file that the manifest lists; a writer calls
    `stage`, writes, and commits. A name that is listed is complete, and its bytes never change.
    """

    @property
    def where(self) -> str:
        """The store as messages name it."""
        ...

    @property
    def streams(self) -> int:
        """So many files are best read at a time."""
        ...

    def locate(self, name: str) -> str:
        """Return where a checkpoint lies, as messages and plans name it."""
        ...

    def names(self) -> list[str]:
        """Return all published names, newest first. Raises: StoreError."""
        ...

    def read_manifest(self, name: str) -> bytes:
        """Return the bytes of a manifest, unchecked but bounded.

        Raises: NotFoundError; StoreError; ManifestError for what cannot be one.
        """
        ...

    def check(
        self, manifest: Manifest, memory: Memory, ranks: Collection[int], /
    ) -> Complete | Absent | Damaged | Unreachable:
        """Compare what lies there with the manifest, by sizes and whatever else costs little.

        Absent where it is right and not all of `ranks` are among it.
        """
        ...

    def ranks(self, manifest: Manifest) -> Collection[int]:
        """Return the ranks of a checkpoint whose files lie there."""
        ...

    def read(self, name: str, entry: FileEntry, start: int = 0) -> Generator[memoryview]:
        """Yield the bytes of one file from `start`; each piece is good until the next is asked for.

        Raises: NotFoundError; StoreError; DamagedError when it has another size; ManifestError
        for a path that leaves the checkpoint.
        """
        ...

    def stage(self, name: str, part: str | None = None) -> CheckpointStaging:
        """Start building the checkpoint `name`.

        `part` is for a copy: what tells it from others (`Manifest.part`). What an interrupted copy
        of the same has left here is gone on with, and what interrupts this one leaves it for the
        next.
        Raises: StagingError; SpaceError.
        """
        ...

    def retire(self, name: str) -> None:
        """Take a name away at once; running readers keep the files. Raises: StoreError."""
        ...


class CheckpointStaging(Protocol):
    """One checkpoint being built. Left uncommitted, nothing of it stays but for the next copy."""

    held_bytes: int
    """What `held` will yield of all files together."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def room_taken(self, entries: Iterable[FileEntry]) -> int:
        """Return how many bytes of `entries` have room here already. Raises: StagingError."""
        ...

    def held(self, entry: FileEntry) -> Generator[memoryview]:
        """Yield what an interrupted copy has left of a file; the caller says whether it is right.

        Raises: StagingError.
        """
        ...

    def drop(self, entry: FileEntry) -> None:
        """Forget what `held` yielded. Raises: StagingError."""
        ...

    def write(
        self,
        entry: FileEntry,
        pieces: Iterable[memoryview],
        missing: int | None = None,
        start: int = 0,
        /,
    ) -> None:
        """Make the file of `entry` out of the `start` bytes held and `pieces`, durable on return.

        Called by several threads at once. `missing` bytes have still to come, for messages.
        Raises: StoreError; StagingError; SpaceError; ManifestError; what `pieces` raises.
        """
        ...

    def commit(self, manifest: Manifest, ranks: Collection[int] | None = None) -> CommitResult:
        """Publish what was built, under the manifest's name or a later generation of it.

        Raises: StagingError; SpaceError; StoreError.
        """
        ...


def open_store(
    url: str, *, dir_mode: int = DIR_MODE, file_mode: int = FILE_MODE
) -> DirectoryStore | ObjectStore:
    """Return the store that a path or a URL names; nothing is touched yet.

    Raises: ConfigError naming what was expected; it repeats no credentials.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        return _directory(url, dir_mode, file_mode)
    if "@" in re.split("[/?#]", rest, maxsplit=1)[0]:
        raise ConfigError(
            f"{scheme}://…: the URL of the shared store holds credentials, which others could see",
            hint="take them out; they come from the environment, see the README",
        )
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or "?" in rest or "#" in rest:
            raise ConfigError("file://…: expected file:///an/absolute/path, and no query")
        from urllib.parse import unquote  # noqa: PLC0415 - most stores are plain paths

        return _directory(unquote(slash + path), dir_mode, file_mode)
    if scheme in SCHEMES:
        return _objects(scheme, rest)
    raise ConfigError(
        f"{scheme}://…: not a kind of store",
        hint=f"expected a path, or a URL with file, {', '.join(SCHEMES)}",
    )


def _directory(path: str, dir_mode: int, file_mode: int) -> DirectoryStore:
    if not path.startswith("/") or "\0" in path:
        # Somebody may have written USER:SECRET@HOST here.
        shown = re.sub("(?s).*@", "…@", path)
        raise ConfigError(f"{shown}: expected an absolute path, or a URL of the shared store")
    return DirectoryStore(Path(path), dir_mode, file_mode)


def _objects(scheme: str, rest: str) -> ObjectStore:
    from importlib.util import find_spec  # noqa: PLC0415 - most stores are plain paths

    from entrypoint.store import bucket  # noqa: PLC0415
    from entrypoint.store.objects import ObjectStore  # noqa: PLC0415

    found = bucket.parse(scheme, rest)
    if find_spec("obstore") is None:
        raise ConfigError(
            f"{found.where}: object stores need obstore, which is not installed",
            hint=f"{sys.executable} -m pip install obstore",
        )
    return ObjectStore(found.where, lambda patience: bucket.connect(found, patience))
