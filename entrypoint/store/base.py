"""What every store can do, and how a setting names one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from entrypoint.errors import ConfigError
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.tree import DIR_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable
    from types import TracebackType
    from typing import Self

    from entrypoint.checkpoint.finding import Complete, Damaged, Unreachable
    from entrypoint.checkpoint.manifest import FileEntry, Manifest
    from entrypoint.state.memory import Memory
    from entrypoint.store.publish import CommitResult


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

    def check(self, manifest: Manifest, memory: Memory) -> Complete | Damaged | Unreachable:
        """Compare what lies there with the manifest, by sizes and whatever else costs little."""
        ...

    def read(self, name: str, entry: FileEntry) -> Generator[memoryview]:
        """Yield the bytes of one file in order; each piece is good until the next is asked for.

        Raises: NotFoundError; StoreError; DamagedError when it has another size; ManifestError
        for a path that leaves the checkpoint.
        """
        ...

    def stage(self, name: str) -> CheckpointStaging:
        """Start building the checkpoint `name`. Raises: StagingError; SpaceError."""
        ...

    def retire(self, name: str) -> None:
        """Take a name away at once; running readers keep the files. Raises: StoreError."""
        ...


class CheckpointStaging(Protocol):
    """One checkpoint being built. Left uncommitted, nothing of it stays."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def write(
        self, entry: FileEntry, pieces: Iterable[memoryview], missing: int | None = None
    ) -> None:
        """Make the file of `entry` out of `pieces`, durable on return.

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
) -> CheckpointStore:
    """Return the store that a path or a `file://` URL names; nothing is touched yet.

    Raises: ConfigError naming what was expected.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        path = url
    elif scheme.lower() == "file":
        from urllib.parse import unquote, urlsplit  # noqa: PLC0415 - most stores are plain paths

        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ConfigError(f"{url}: expected file:///an/absolute/path")
        path = unquote(parts.path)
    else:
        raise ConfigError(
            f"{url}: stores of the kind {scheme}:// are not built yet",
            hint="mount it, and give the path of the mount",
        )
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{url}: expected an absolute path", hint=f"found {path!r}")
    return DirectoryStore(Path(path), dir_mode, file_mode)
