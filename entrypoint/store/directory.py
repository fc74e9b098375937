"""A store that is a directory: on a local disk, or on any shared file system."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from entrypoint.checkpoint.entry import FileEntry, check_path
from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Unreachable
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.inspect import Stamp, nobody_waits, ranks_in, stamp_of
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from entrypoint.errors import ManifestError, NotFoundError, StoreError
from entrypoint.state.memory import Memory
from entrypoint.store import look, tree
from entrypoint.store.tree import DIR_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable

    from entrypoint.store.staging import Staging


STREAMS: Final = 4


class DirectoryStore:
    """The checkpoints below `root`. Reading changes nothing in it.

    One that `begins_absent` is made by the first that is saved or copied: until then it has none.
    """

    def __init__(
        self,
        root: Path,
        dir_mode: int = DIR_MODE,
        file_mode: int = FILE_MODE,
        *,
        begins_absent: bool = False,
    ) -> None:
        self.root, self.dir_mode, self.file_mode = root, dir_mode, file_mode
        self._begins_absent = begins_absent

    @property
    def where(self) -> str:
        """The store as messages name it."""
        return str(self.root)

    @property
    def streams(self) -> int:
        """So many files are best read at a time."""
        return STREAMS

    def names(self, alive: Callable[[], None] = nobody_waits) -> list[str]:
        """Return all published names, newest manifest first; `alive` is called for each entry.

        Raises: StoreError, also when the directory is not there, unless it `begins_absent`: perhaps
        it is not mounted. A link that leads nowhere is no beginning.
        """
        found: list[tuple[int, str]] = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    alive()
                    # Hidden names are staging and trash.
                    if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                        continue
                    written = _written(Path(entry.path) / MANIFEST)
                    if written is not None:
                        found.append((-written, entry.name))
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError) and not os.path.islink(self.root)
            if self._begins_absent and is_gone:
                return []
            raise StoreError(f"{self.root}: {error.strerror}") from error
        return [name for _, name in sorted(found)]

    def stamps(
        self, names: Iterable[str], alive: Callable[[], None] = nobody_waits
    ) -> list[Stamp | None]:
        """Return what tells each one's manifest from another file; None where there is none.

        `alive` is called for each.
        """
        found: list[Stamp | None] = []
        for name in names:
            alive()
            try:
                found.append(stamp_of(os.lstat(self.path(name) / MANIFEST)))
            except OSError:
                found.append(None)
        return found

    def path(self, name: str) -> Path:
        """Return the directory of a checkpoint."""
        return self.root / name

    def locate(self, name: str) -> str:
        """Return the directory of a checkpoint, for messages and plans."""
        return f"{self.root}/{name}"

    def read_manifest(self, name: str) -> bytes:
        """Return the bytes of a checkpoint's manifest, unchecked.

        Raises: NotFoundError; StoreError; ManifestError for what cannot be one.
        """
        path = f"{name}/{MANIFEST}"
        check_path(path, "path")
        try:
            return read_bounded(self.root / path, MAX_MANIFEST_BYTES)
        except ValueError as error:  # it names the path
            raise ManifestError(str(error)) from None
        except OSError as error:
            raise self._failure(error, path) from error

    def check(
        self,
        manifest: Manifest,
        memory: Memory,
        ranks: Collection[int],
        alive: Callable[[], None] = nobody_waits,
    ) -> Complete | Absent | Damaged | Unreachable:
        """Compare the files with the manifest; `memory` keeps what needs no second reading.

        `alive` is called for each file.
        """
        return look.check(self.path(manifest.name), manifest, memory, ranks, alive)

    def ranks(self, manifest: Manifest) -> Collection[int]:
        """Return the ranks of a checkpoint whose files are here."""
        return ranks_in(self.path(manifest.name), manifest)

    def read(self, name: str, entry: FileEntry, start: int = 0) -> Generator[memoryview]:
        """Yield the bytes of a regular file from `start`, in order; no link is followed.

        Raises: NotFoundError; StoreError; DamagedError when it has another size; ManifestError
        for a path that leaves the checkpoint.
        """
        from entrypoint.store import pieces  # noqa: PLC0415 - a hit copies nothing

        where = f"{self.where}: {name}/{entry.path}"
        return pieces.read(lambda: self.open(name, entry.path), entry.size, where, start)

    def open(self, name: str, path: str) -> int:
        """Return a descriptor of a regular file; no link is followed.

        Raises: NotFoundError; StoreError; ManifestError for a path that leaves the checkpoint.
        """
        check_path(f"{name}/{path}", "path")
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return tree.open_regular(root, f"{name}/{path}")
            finally:
                os.close(root)
        except OSError as error:
            raise self._failure(error, f"{name}/{path}") from error

    def stage(self, name: str, part: str | None = None) -> Staging:
        """Start building a checkpoint here, or go on with an interrupted copy of `part`.

        Raises: StagingError; SpaceError.
        """
        from entrypoint.store import resume, staging  # noqa: PLC0415 - a hit builds nothing

        modes = {"dir_mode": self.dir_mode, "file_mode": self.file_mode}
        if part is not None:
            return resume.begin(self.root, name, part, **modes)
        return staging.begin(self.root, name, **modes)

    def retire(self, name: str) -> None:
        """Take a name away at once; running readers keep the files. Raises: StoreError."""
        check_path(name, "name")
        try:
            from entrypoint.store import trash  # noqa: PLC0415 - a hit retires nothing

            trash.retire(self.root, name, self.dir_mode)
        except OSError as error:
            raise self._failure(error, name) from error

    def _failure(self, error: OSError, path: str) -> StoreError | NotFoundError:
        message = f"{self.root / path}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            return NotFoundError(message)
        return StoreError(message)


def _written(manifest: Path) -> int | None:
    try:
        status = manifest.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # Unpublished meanwhile, or not ours to read: not listed.
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
