"""What every store can do, and how a setting names one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from entrypoint.errors import ConfigError
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.tree import DIR_MODE, FILE_MODE

if TYPE_CHECKING:
    from entrypoint.store.staging import Staging


class CheckpointStore(Protocol):
    """Moves a checkpoint's bytes under a name, and knows nothing of what they mean.

    So small that a directory, an object store and a test can all be one. A reader calls `names`,
    then `read_manifest`, then `open` for each file that the manifest lists; a writer calls
    `stage`, builds, and commits. A name that is listed is complete, and its bytes never change.
    """

    @property
    def where(self) -> str:
        """The store as messages name it."""
        ...

    def names(self) -> list[str]:
        """Return all published names, newest first. Raises: StoreError."""
        ...

    def read_manifest(self, name: str) -> bytes:
        """Return the bytes of a manifest, unchecked but bounded.

        Raises: NotFoundError; StoreError.
        """
        ...

    def open(self, name: str, path: str) -> int:
        """Return a descriptor for positional reads of one file.

        Raises: NotFoundError; StoreError; ManifestError for a path that leaves the checkpoint.
        """
        ...

    def stage(self, name: str) -> Staging:
        """Start building the checkpoint `name`. Raises: StagingError; SpaceError."""
        ...


def open_store(url: str, *, dir_mode: int = DIR_MODE, file_mode: int = FILE_MODE) -> DirectoryStore:
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
