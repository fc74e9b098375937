"""Looking at the source: where it is, which files it has, whether this user may read them.

Every look runs in a child, which is given up once it falls silent: a hung mount must never block
a boot that has a checkpoint already, and a slow one must never be taken for hung, since what was
there before would be served.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES
from entrypoint.model import access, hub, mount
from entrypoint.model.bounded import HUNG_SECONDS, Alive, while_alive
from entrypoint.model.contents import SourceFile, contents


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
    files = contents(str(directory), alive)
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
