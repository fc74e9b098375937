"""Looking at the source: where it is, which files it has, who may read them.

Every look runs in a child with a time bound: a hung mount must never block a boot that has a
checkpoint already.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.inspect import Stamp
from entrypoint.checkpoint.manifest import HAVE, INDEX, MANIFEST
from entrypoint.errors import OwnershipError

LOOK_SECONDS: Final = 2.0
PREFERRED_WEIGHTS: Final = (".safetensors",)
OTHER_WEIGHTS: Final = (".bin", ".pt", ".pth", ".gguf")
MODEL_SUFFIXES: Final = (
    *(".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml"),
    *(".vocab", ".bpe", ".spm"),
)
"""config, generation config, tokenizers of every kind, chat templates, processors, custom code."""

MAX_SOURCE_FILES: Final = 20_000


class SourceFile(NamedTuple):
    """One file of the source: path relative to it, its stamp, and its blob's sha256 if known."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    sha256: str | None = None

    @property
    def stamp(self) -> Stamp:
        """While it stands, the bytes stand."""
        return (self.size, self.mtime_ns, self.inode, self.ctime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a look at the source found; `directory` is None when it is not on this machine.

    `timed_out`: the look hung, so nothing is known. `denied`: the path this user may not read.
    `broken`: what is wrong with the source that is there, so that it is as good as none.
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

    @property
    def stamps(self) -> Json:
        """Everything that moves when any byte of the source does."""
        files: list[Json] = [[f.path, *f.stamp] for f in (*self.weights, *self.model_files)]
        return [self.directory, files]


def survey(
    word: str, revision: str | None, environ: Mapping[str, str], seconds: float = LOOK_SECONDS
) -> Survey:
    """Look at the source in a child, for at most `seconds`; a hang is reported, never waited for.

    Raises: OwnershipError when the source is there and this user may not read it.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report(writer, word, revision, environ)
    os.close(writer)
    try:
        answer = _gather(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
    if answer is None:
        # Not waited for: a process in uninterruptible sleep cannot be reaped.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
        return Survey(word=word, timed_out=True)
    os.waitpid(pid, 0)
    found = _decode(answer)
    if found.denied:
        msg = f"{found.denied}: uid {os.geteuid()} may not read the model"
        raise OwnershipError(msg, hint="chown or chmod the source, or choose another --user")
    return found


def _report(writer: int, word: str, revision: str | None, environ: Mapping[str, str]) -> NoReturn:
    """In the child: send what was found and end, without anything of the parent's exit."""
    try:
        data = json.dumps(asdict(look(word, revision, environ))).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _gather(descriptor: int, deadline: float) -> bytes | None:
    answer = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        piece = os.read(descriptor, 1 << 20)
        if not piece:
            return answer or None
        answer += piece


def _decode(answer: bytes) -> Survey:
    fields = json.loads(answer)
    for group in ("weights", "model_files"):
        fields[group] = tuple(SourceFile(*values) for values in fields[group])
    return Survey(**fields)


def look(word: str, revision: str | None, environ: Mapping[str, str]) -> Survey:
    """Find the source on this machine, and stat its files. May hang with the file system."""
    try:
        return _look(word, revision, environ)
    except PermissionError as error:
        return Survey(word=word, denied=str(error.filename))
    except FileNotFoundError as error:
        return Survey(word=word, broken=f"{error.filename}: a link to a file that is not there")
    except OSError as error:
        return Survey(word=word, broken=f"{error.filename}: {error.strerror}")


def _look(word: str, revision: str | None, environ: Mapping[str, str]) -> Survey:
    directory, commit = _locate(word, revision, environ)
    if directory is None:
        return Survey(word=word, revision=commit)
    if (directory / MANIFEST).is_file():
        return Survey(word=word, directory=str(directory), is_checkpoint=True)
    weights, model_files = _files(directory)
    return Survey(
        word=word,
        directory=str(directory),
        revision=commit,
        weights=weights,
        model_files=model_files,
    )


_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def _locate(
    word: str, revision: str | None, environ: Mapping[str, str]
) -> tuple[Path | None, str | None]:
    """Return the source's directory and commit: a path as given, or a hub id's cached snapshot."""
    path = Path(word)
    if path.is_dir():
        # vLLM takes the directory as it is; a snapshot's own name is its commit.
        is_snapshot = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
        return path.absolute(), path.name if is_snapshot else None
    named = revision if revision and _COMMIT.fullmatch(revision) else None
    if not _HUB_ID.fullmatch(word):
        return None, named
    repository = hub_cache(environ) / f"models--{word.replace('/', '--')}"
    commit = named or _reference(repository, revision or "main")
    if commit is None:
        return None, None
    snapshot = repository / "snapshots" / commit
    return (snapshot if snapshot.is_dir() else None), commit


def _reference(repository: Path, revision: str) -> str | None:
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps its snapshots (its constants.py: HF_HUB_CACHE)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"], "hub")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return Path(cache, "huggingface", "hub")


def _files(directory: Path) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...]]:
    """Return (weights, model files), each sorted by path; a dangling link is an error."""
    preferred, other, model_files = [], [], []
    for path in _walk(directory):
        name = path.name.lower()
        if name.endswith(PREFERRED_WEIGHTS):
            preferred.append(path)
        elif name.endswith(OTHER_WEIGHTS):
            other.append(path)
        elif is_model_file(path.relative_to(directory).as_posix()):
            model_files.append(path)
    # vLLM takes safetensors where there are any, and looks at nothing else then.
    weights = preferred or other
    return (
        tuple(_stat(directory, path) for path in sorted(weights)),
        tuple(_stat(directory, path) for path in sorted(model_files)),
    )


def is_model_file(path: str) -> bool:
    """Whether a checkpoint carries the source's file `path`: no weights, no weight index."""
    name = path.rsplit("/", 1)[-1].lower()
    return (
        name.endswith(MODEL_SUFFIXES)
        and not name.endswith(".index.json")
        and name not in (MANIFEST, INDEX, HAVE)
    )


def _walk(directory: Path) -> list[Path]:
    found: list[Path] = []
    for root, directories, files in os.walk(directory, onerror=_raise):
        # Hidden: .cache, .git. "original" holds the same weights in another form.
        directories[:] = sorted(
            d for d in directories if not d.startswith((".", "__pycache__")) and d != "original"
        )
        found += [Path(root, name) for name in files if not name.startswith(".")]
        if len(found) > MAX_SOURCE_FILES:
            break
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def _stat(directory: Path, path: Path) -> SourceFile:
    status = path.stat()
    if not os.access(path, os.R_OK):
        raise PermissionError(13, "Permission denied", str(path))
    return SourceFile(
        path.relative_to(directory).as_posix(),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
        _blob_sha256(path),
    )


def _blob_sha256(path: Path) -> str | None:
    """Return the sha256 that the hub's cache names a large file's blob by."""
    if not path.is_symlink():
        return None
    target = os.path.basename(os.readlink(path))
    return target if re.fullmatch(r"[0-9a-f]{64}", target) else None
