"""What a source consists of: its weights and its model files, each with its stamp."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import errno
import os
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from entrypoint.checkpoint.entry import HAVE, INDEX
from entrypoint.checkpoint.inspect import Stamp
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.model import access, hub, mount
from entrypoint.model.bounded import Alive

PREFERRED_WEIGHTS: Final = (".safetensors",)
OTHER_WEIGHTS: Final = (".bin", ".pt", ".pth", ".gguf")
MODEL_SUFFIXES: Final = (
    *(".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml"),
    *(".vocab", ".bpe", ".spm"),
)
"""config, generation config, tokenizers of every kind, chat templates, processors, custom code."""

MAX_SOURCE_FILES: Final = 20_000

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
    for path in _walk(directory, alive):
        name = path.rpartition("/")[2].lower()
        if name.endswith((*PREFERRED_WEIGHTS, *OTHER_WEIGHTS)) and "/" in path:
            below.append(path)
        elif name.endswith(PREFERRED_WEIGHTS):
            preferred.append(path)
        elif name.endswith(OTHER_WEIGHTS):
            other.append(path)
        elif name.endswith(MODEL_SUFFIXES) and name not in (MANIFEST, HAVE):
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
    is_weight = path.lower().endswith((*PREFERRED_WEIGHTS, *OTHER_WEIGHTS))
    return path == "config.json" or ("/" not in path and is_weight)


def _components(path: str) -> list[str]:
    return path.split("/")


def is_copied(path: str) -> bool:
    """Whether a checkpoint carries the source's model file `path`: not an index of its weights."""
    name = path.rsplit("/", 1)[-1].lower()
    is_ours = name in (MANIFEST, INDEX, HAVE)
    return name.endswith(MODEL_SUFFIXES) and not name.endswith(".index.json") and not is_ours


def _walk(directory: str, alive: Alive) -> list[str]:
    """Return the paths, relative to the source, of all files that may be the model's.

    Links to directories are followed, to each once: vLLM reads what lies behind them as well.
    """
    found: list[str] = []
    seen = {_place(directory)}
    # What lies below and may not be read, such as lost+found, vLLM does not read either.
    walk = os.walk(directory, onerror=_raise_at(directory), followlinks=True)
    for root, directories, files in walk:
        alive()
        # Hidden: .cache, .git. "original" holds the same weights in another form.
        below = sorted(d for d in directories if not d.startswith((".", "__pycache__")))
        directories.clear()
        for name in below:
            place = _place(os.path.join(root, name))
            if name != "original" and place not in seen:
                seen.add(place)
                directories.append(name)
        prefix = root[len(directory) :].lstrip("/")
        found += [os.path.join(prefix, name) for name in files if not name.startswith(".")]
        if len(found) > MAX_SOURCE_FILES:
            # What was left out might change unseen.
            text = f"more than {MAX_SOURCE_FILES} files are too many for a model"
            raise OSError(errno.EFBIG, text, directory)
    return found


def _place(directory: str) -> tuple[int, int] | None:
    """Return what a directory is, by whatever path; None where that is not told."""
    try:
        status = os.stat(directory)
    except PermissionError:
        return None
    return status.st_dev, status.st_ino


def _raise_at(top: str) -> Callable[[OSError], None]:
    def on_error(error: OSError) -> None:
        if error.filename == top or not isinstance(error, PermissionError):
            raise error

    return on_error


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
