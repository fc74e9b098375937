"""What the ranks of a save wrote becomes a checkpoint: identity, model files, manifest, index."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import datetime as dt
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from blake3 import blake3

from entrypoint.checkpoint import fragment
from entrypoint.checkpoint.digest import PIECE_BYTES, Json
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.fragment import Fragment, fragment_name
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import checkpoint_name, layout_of
from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.errors import SaveError, ShardbootError
from entrypoint.model import hub
from entrypoint.model import identity as model_identity
from entrypoint.model import survey as surveys
from entrypoint.model.files import NO_TENSORS, is_copied, is_marker
from entrypoint.model.identity import Identity
from entrypoint.model.survey import Survey, survey
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections
from entrypoint.store.staging import Staging, write_all


class Subject(NamedTuple):
    """What is saved: the model as vLLM reads the words, and the source as boot looked at it.

    `key.model` is still empty; `word` and `revision` are the user's own.
    """

    key: Key
    word: str
    revision: str | None
    plugin: str | None
    source: Survey
    identity: Identity

    @property
    def name(self) -> str:
        """What staging is called while the model's identity is not known yet."""
        return checkpoint_name(self.word, self.key)

    @property
    def key_by_config(self) -> str:
        """The digest that refusals of this model go by, whatever its weights are."""
        return model_identity.key_by_config(self.key, self.identity)

    def to_json(self) -> dict[str, Json]:
        """Return the subject for another process."""
        fields = {**self._asdict(), "key": self.key.to_json()}
        fields |= {"source": self.source._asdict(), "identity": self.identity._asdict()}
        return cast("dict[str, Json]", fields)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return what another process of this version has made JSON of."""
        read = {
            "key": Key.from_json(fields["key"]),
            "source": surveys.decode(dict(fields["source"])),
            "identity": Identity(**fields["identity"]),
        }
        return cls(**{**fields, **read})


class Reading(threading.Thread):
    """Reads the source in full for its identity, beside whatever else has to be waited for."""

    def __init__(self, subject: Subject, memory: Memory) -> None:
        super().__init__(daemon=True, name="identity")
        self._subject, self._memory = subject, memory
        self._identity: Identity | None = None
        self._error: ShardbootError | None = None

    def run(self) -> None:
        source, known = self._subject.source, self._subject.identity
        try:
            self._identity = model_identity.read_in_full(source, known, self._memory)
        except ShardbootError as error:
            self._error = error

    def result(self, seconds: float) -> Identity:
        """Wait for it, at most so long. Raises: SaveError, StoreError."""
        self.join(seconds)
        if self.is_alive():
            msg = (
                f"{self._subject.source.directory} was not read in time, to know which model it is"
            )
            raise SaveError(msg, reason="save.timeout", hint="raise --save-timeout")
        if self._error is not None:
            raise self._error
        if self._identity is None:
            msg = "the source's identity could not be taken"
            raise SaveError(msg)
        return self._identity


def assemble(
    subject: Subject,
    staging: Staging,
    identity: Identity,
    environ: Mapping[str, str],
    seconds: float,
) -> Manifest:
    """Add to `staging`, where all ranks have written, what makes it a checkpoint; say what it is.

    `seconds` is what the save took so far. All is ready to be committed, or proved.
    Raises: SaveError, also when the source has changed; StagingError, SpaceError.
    """
    model_files = copy_model_files(subject.source, staging)
    _check_unchanged(subject, environ)
    manifest, index_bytes = fragment.assemble(
        _fragments(staging, subject.key),
        model_files,
        subject.key._replace(model=identity.ways["blake3"]),
        Source(subject.word, _commit(subject.source, identity), identity.ways),
        save=_about(subject, seconds),
        # Finer than a second: saves are told apart by the bytes of their manifests.
        created_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
    )
    staging.write_file(INDEX, index_bytes)
    return manifest


def forget_refusals(subject: Subject, manifest: Manifest, state_dir: Path) -> None:
    """Take back what earlier tries found: this one went well."""
    rejections = Rejections(state_dir)
    for digest in (subject.key_by_config, manifest.key.digest):
        # Only for the next boot's sake; the checkpoint is there either way.
        with contextlib.suppress(OSError):
            rejections.remove(digest)


def _fragments(staging: Staging, key: Key) -> list[Fragment]:
    fragments = []
    for rank in layout_of(key).ranks:
        try:
            fragments.append(fragment.decode((staging.path / fragment_name(rank)).read_bytes()))
        except FileNotFoundError:
            msg = f"rank {rank} wrote no fragment"
            raise SaveError(msg) from None
    return fragments


def copy_model_files(source: Survey, staging: Staging) -> list[FileEntry]:
    """Copy the source's non-weight files, links dereferenced; return their entries.

    By some weights vLLM knows how to read the others: files of their names come along, empty.
    Raises: SaveError when one cannot be read; StagingError, SpaceError.
    """
    directory = Path(cast("str", source.directory))
    paths = [file.path for file in source.model_files if is_copied(file.path)]
    markers = [file.path for file in source.weights if is_marker(file.path)]
    return [
        *(_write_one(path, _pieces(directory / path), staging) for path in paths),
        *(_write_one(path, [NO_TENSORS], staging) for path in markers),
    ]


def _write_one(path: str, pieces: Iterable[bytes], staging: Staging) -> FileEntry:
    hasher = blake3()
    size = 0
    descriptor = staging.create(path)
    try:
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
            with staging.writing(path):
                write_all(descriptor, piece)
        with staging.writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(path=path, size=size, blake3=str(hasher.hexdigest()), role="model")


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise SaveError(f"{path}: cannot be copied: {error.strerror}") from None


def _check_unchanged(subject: Subject, environ: Mapping[str, str]) -> None:
    """Refuse a save whose source moved under it: its identity would name other bytes."""
    now = survey(subject.source.word, subject.revision, environ, silence=60.0)
    if now.stamps != subject.source.stamps:
        msg = f"{subject.source.directory}: the source changed while it was saved"
        raise SaveError(msg, hint="boot again when nothing writes to it")


def _commit(source: Survey, identity: Identity) -> str | None:
    """Return the commit that the source is, None where any file is not what the hub named it by.

    Elsewhere the commit alone tells what a checkpoint was saved from. Raises: SaveError.
    """
    # Beside "blake3", from a full read: see `Identity`.
    if source.directory is None or "sha256" not in identity.ways:
        return None
    root = Path(source.directory)
    try:
        is_whole = all(hub.is_named_right(root / file.path) for file in source.model_files)
    except OSError as error:
        raise SaveError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return source.revision if is_whole else None


def _about(subject: Subject, seconds: float) -> dict[str, Json]:
    return {
        "seconds": round(seconds, 1),
        "host": os.uname().nodename,
        "vllm": subject.key.vllm,
        "plugin": subject.plugin,
        "source_bytes": sum(file.size for file in subject.source.weights),
    }
