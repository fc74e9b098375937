"""What a source consists of: its weights and its model files, each with its stamp."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import errno
import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from entrypoint.checkpoint.inspect import Stamp
from entrypoint.model import access, files, hub, mount
from entrypoint.model.bounded import Alive

SECOND: Final = 10**9
"""Of nanoseconds."""


class SourceFile(NamedTuple):
    """One file of the source: path relative to it, its stamp, and the sha256 its blob is named by.

    `is_later`: that blob was written to since it was linked, while the hub links what it fetched.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    sha256: str | None = None
    is_later: bool = False

    @property
    def stamp(self) -> Stamp:
        """While it stands, the bytes stand, if the file is dated."""
        return (self.size, self.mtime_ns, self.inode, self.ctime_ns)

    @property
    def is_dated(self) -> bool:
        """Whether a clock has set its ctime, and not who built an image: those set whole seconds.

        One image's inodes are numbered as the next one's.
        """
        return self.ctime_ns % SECOND != 0


class Files(NamedTuple):
    """What a source consists of, each kind sorted by path; `denied`: one that may not be read."""

    weights: tuple[SourceFile, ...]
    model_files: tuple[SourceFile, ...]
    denied: str | None


def contents(directory: str, alive: Alive) -> Files:
    """Return what the model consists of; a dangling link is an error.

    Weight indexes are among the model files: vLLM chooses shards by them.
    """
    preferred, other, below, model_files = [], [], [], []
    for path in files.walk(directory, alive):
        if files.is_weights(path) and "/" in path:
            below.append(path)
        elif path.lower().endswith(files.PREFERRED_WEIGHTS):
            preferred.append(path)
        elif files.is_weights(path):
            other.append(path)
        elif files.is_model_file(directory, path):
            model_files.append(path)
    # vLLM takes safetensors where the top level has any, and looks at no other weights then.
    weights = [*(preferred or other), *below]
    if _caches_stamps(directory):
        for path in weights:
            alive()
            access.may_open(os.path.join(directory, path))
    denied: list[str] = []
    return Files(
        # Every boot may have to read model files; weights, see `access.unreadable`.
        weights=_look_at(directory, weights, alive, denied, opens=False),
        model_files=_look_at(directory, model_files, alive, denied, opens=True),
        denied=os.path.join(directory, denied[0]) if denied else None,
    )


def _caches_stamps(directory: str) -> bool:
    """Tell where a stamp may be a minute old, until a file is opened (close-to-open, nfs(5))."""
    device = os.stat(directory).st_dev
    # A disk's file system has its number, and needs no look at the table.
    return os.major(device) == 0 and mount.kind_of(device) in ("nfs", "nfs4")


def _look_at(
    directory: str, paths: Iterable[str], alive: Alive, denied: list[str], *, opens: bool
) -> tuple[SourceFile, ...]:
    """Return what is there, sorted by path; `denied` gets what may not be read.

    Raises: PermissionError for what vLLM cannot do without.
    """
    found = []
    for path in sorted(paths, key=_components):
        alive()
        full = os.path.join(directory, path)
        is_denied = opens and not access.may_open(full)
        try:
            found.append(_stat(directory, path))
        except PermissionError:
            is_denied = True
        if is_denied and is_needed(path):
            raise PermissionError(errno.EACCES, "may not be read", full)
        if is_denied:
            denied.append(path)
    return tuple(found)


def is_needed(path: str) -> bool:
    """Tell what vLLM opens of every model; whatever else it needs it says itself."""
    return path == "config.json" or ("/" not in path and files.is_weights(path))


def _components(path: str) -> list[str]:
    return path.split("/")


def _stat(directory: str, relative: str) -> SourceFile:
    path = os.path.join(directory, relative)
    status = os.stat(path)
    sha256 = hub.blob_sha256(path)
    return SourceFile(
        path=relative,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        ctime_ns=status.st_ctime_ns,
        sha256=sha256,
        is_later=sha256 is not None and status.st_mtime_ns > os.lstat(path).st_mtime_ns,
    )
