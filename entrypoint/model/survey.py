"""Looking at the source: where it is, which files it has, whether this user may read them.

Every look runs in a child, which is given up once it falls silent: a hung mount must never block
a boot that has a checkpoint already, and a slow one must never be taken for hung, since what was
there before would be served.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.entry import HAVE, INDEX
from entrypoint.checkpoint.inspect import Stamp
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES
from entrypoint.model import access, hub, mount
from entrypoint.model.bounded import HUNG_SECONDS, Alive, while_alive

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


class Survey(NamedTuple):
    """What a look at the source found; `directory` is None when it is not on this machine.

    `revision`: the full commit; of a source that is not here, only as the words name it.
    `timed_out`: the look hung, so nothing is known. `denied`: what this user may not read, so that
    nobody can tell which model it is.
    `broken`: what is wrong with the source that is there, so that it is as good as none. `undated`:
    where files are not dated, what tells the file systems under them from any others that are ever
    mounted there, or "" where nothing does.
    """

    word: str
    directory: str | None = None
    revision: str | None = None
    weights: tuple[SourceFile, ...] = ()
    model_files: tuple[SourceFile, ...] = ()
    is_checkpoint: bool = False
    timed_out: bool = False
    denied: str | None = None
    broken: str | None = None
    undated: str | None = None

    @property
    def stamps(self) -> Json:
        """Everything that moves when any byte of the source does, unless `undated` is ""."""
        files: list[Json] = [[f.path, *f.stamp] for f in (*self.weights, *self.model_files)]
        return [self.directory, files, self.undated]


def survey(
    word: str, revision: str | None, environ: Mapping[str, str], silence: float = HUNG_SECONDS
) -> Survey:
    """Look at the source in a child, and wait while it gets on; a hang is reported.

    Raises: OwnershipError when the source is there and this user may not read its config.
    """
    try:
        answer = while_alive(
            silence, lambda alive: cast("Json", look(word, revision, environ, alive)._asdict())
        )
    except ChildProcessError as error:
        return Survey(word=word, broken=f"{word}: {error}")
    if not isinstance(answer, dict):
        return Survey(word=word, timed_out=True)
    found = decode(cast("dict[str, Any]", answer))
    if found.denied and found.directory is None:
        raise access.not_readable(found.denied)
    return found


def decode(fields: dict[str, Any]) -> Survey:
    """Return the survey that another process has made JSON of."""
    for group in ("weights", "model_files"):
        fields[group] = tuple(SourceFile(*values) for values in fields[group])
    return Survey(**fields)


def look(
    word: str,
    revision: str | None,
    environ: Mapping[str, str],
    alive: Alive = lambda: None,
) -> Survey:
    """Find the source on this machine, and stat its files. May hang with the file system.

    `alive` is called before every question but the first few.
    """
    try:
        return _look(word, revision, environ, alive)
    except PermissionError as error:
        return Survey(word=word, denied=str(error.filename))
    except FileNotFoundError as error:
        return Survey(word=word, broken=f"{error.filename}: a link to a file that is not there")
    except OSError as error:
        return Survey(word=word, broken=f"{error.filename}: {error.strerror}")


def _look(word: str, revision: str | None, environ: Mapping[str, str], alive: Alive) -> Survey:
    directory, commit = _locate(word, revision, environ)
    # A branch moves on: what it was when a config was fetched is not what vLLM would load today.
    absent = Survey(word=word, revision=hub.full_commit(revision))
    if directory is None:
        return absent
    if _is_checkpoint(directory):
        return Survey(word=word, directory=str(directory.resolve()), is_checkpoint=True)
    files = _files(str(directory), alive)
    if not files.weights and not Path(word).is_dir():
        # A hub id of which only the config was fetched so far.
        return absent
    return Survey(
        word=word,
        directory=str(directory),
        revision=commit,
        weights=files.weights,
        model_files=files.model_files,
        denied=files.denied,
        undated=_undated(str(directory), (*files.weights, *files.model_files)),
    )


def _undated(directory: str, files: Iterable[SourceFile]) -> str | None:
    instances = {
        mount.instance_of(os.path.join(directory, file.path)) for file in files if not file.is_dated
    }
    if not instances:
        return None
    return "" if "" in instances else ", ".join(sorted(instances))


def _is_checkpoint(directory: Path) -> bool:
    """Tell a checkpoint from a model with a manifest.json of its own kind."""
    path = directory / MANIFEST
    if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
        return False
    try:
        document = json.loads(path.read_bytes())
    except (RecursionError, ValueError):
        return False
    return isinstance(document, dict) and {"schema", "key_digest", "files"} <= document.keys()


def _locate(
    word: str, revision: str | None, environ: Mapping[str, str]
) -> tuple[Path | None, str | None]:
    """Return the source's directory and commit: a path as given, or a hub id's cached snapshot.

    None and None when it is not here.
    """
    path = Path(word)
    if path.is_dir():
        # vLLM takes the directory as it is.
        return path.absolute(), hub.commit_of(path)
    snapshot = hub.snapshot(word, revision, environ)
    return snapshot, snapshot.name if snapshot is not None else None


def _files(directory: str, alive: Alive) -> Files:
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
