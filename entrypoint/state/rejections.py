"""Checkpoints known not to load to the source's state: never served, never fetched again.

One small file each, by the manifest's digest, or by a key's where nothing was committed. They lie
beside the stores, so that they outlive the checkpoints. What shardboot found itself counts until
another version of it may find otherwise; what people said, and boots that died, count until taken
back.

A file that is there and cannot be read rejects: somebody meant this very checkpoint. A directory
that may not be searched rejects none. It would be all of them, for a reason that nobody gave; and
what keeps wrong weights out does not lie there: the key, the proof, the loader's look at every
tensor. It may hide what a person said: boot says that the state directory is of no use.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint import __version__
from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.state.files import fsync_directory, read_json, write_json
from entrypoint.state.places import below

KINDS: Final = ("unproved", "unproven", "unfit", "never-loaded", "quarantined", "operator")
"""No proof yet; it failed; the loader disagreed; boots in a row died before they began to load it,
which is never kept, or while they did; a person said so."""

BY_THE_MODEL: Final = (
    *("save.data-parallel", "save.dtype", "save.meta-tensor", "save.online-quant"),
)
"""Refusals that come again as long as model, words and vLLM stay: no later boot tries in vain."""

LASTING: Final = ("quarantined", "operator")

MAX_ASKED: Final = 16
"""Kept of one checkpoint; the oldest is tried again beyond that."""

UNPROBED: Final = "tee.proof"
"""What no load alone can prove, of a model by its key: not to be saved on the way again."""

PUBLIC: Final = 0o644
PUBLIC_DIRECTORY: Final = 0o755
"""No secret, and an operator who is root writes what the service user must read."""


class Rejection(NamedTuple):
    """Why a checkpoint is not served: one of `KINDS`; for a key, why none can be saved: a code."""

    kind: str
    reason: str


class Rejections:
    """All rejections under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, digest: str, asked: str = "") -> Rejection | None:
        """Return why the manifest or key with this digest is rejected, or None.

        For what vLLM was `asked`, by its digest, if it is rejected for that alone.
        """
        path = self._path(digest)
        entry = read_json(path)
        if not isinstance(entry, dict):
            # False where the directory may not be searched.
            is_there = os.path.exists(path)
            return Rejection("operator", f"{path}: cannot be read") if is_there else None
        found = Rejection(str(entry.get("kind")), str(entry.get("reason", "no reason kept")))
        lapsed = entry.get("shardboot", __version__) != __version__ and found.kind not in LASTING
        only = _asked(entry)
        is_for_others = bool(asked and only) and asked not in only
        return None if lapsed or is_for_others else found

    def flaw(self, digest: str, *, is_loaded: bool) -> Rejection | None:
        """Return why no boot would serve the manifest with this digest, or None.

        What did not fit one thing that vLLM was asked may fit another: where vLLM `is_loaded` with
        it, as boots here have told, it does.
        """
        found = self.find(digest)
        fits_others = is_loaded and found is not None and _asked(read_json(self._path(digest)))
        return None if fits_others else found

    def add(self, digest: str, kind: str, reason: str, asked: str = "") -> bool:
        """Reject, if so told for what vLLM was `asked` alone, beside what else was.

        Durable when this returns True. False where nothing can be written.
        """
        path, found = self._path(digest), self.find(digest)
        # What has lapsed nobody has found of this version.
        before = _asked(read_json(path)) if found is not None else []
        if asked and not before and found is not None:
            return True
        others = [each for each in before if each != asked]
        entry: dict[str, Json] = {
            "kind": kind,
            "reason": reason,
            "asked": [*others[-MAX_ASKED + 1 :], asked] if asked else [],
            "shardboot": __version__,
            "time": round(time.time(), 3),
        }
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                _publish(path.parent)
            write_json(path, entry, PUBLIC)
        except OSError:
            return False
        return True

    def refuse(self, key: str, reason: str, text: str) -> None:
        """Remember why none can be saved for a key, where another save would end the same way."""
        if reason in BY_THE_MODEL:
            self.add(key, reason, text)

    def remove(self, digest: str) -> bool:
        """Take a rejection back; return whether there was one. Raises: OSError."""
        path = self._path(digest)
        found = path.exists()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            fsync_directory(path.parent)
        return found

    def _path(self, digest: str) -> Path:
        return below(self.root, "rejections") / f"{digest}.json"


def _asked(entry: Json) -> list[Json]:
    """Return what vLLM was asked wherever it is rejected; empty where that is everywhere."""
    found = entry.get("asked") if isinstance(entry, dict) else None
    return found if isinstance(found, list) else []


def on_the_way(key: str) -> str:
    """Return by what it goes that a key, which may be saved, is not to be saved on the way."""
    return digest_json(["on the way", key])


def _publish(directory: Path) -> None:
    """Let all read a directory, whatever the umask of whoever rejects; no link is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(directory, flags)
    try:
        os.fchmod(descriptor, PUBLIC_DIRECTORY)
    finally:
        os.close(descriptor)
