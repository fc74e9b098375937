"""The Hugging Face cache: where the snapshot of a hub id lies, and what its names tell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def snapshot(word: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the directory of a hub id's snapshot, named by its commit; None if it is not here.

    Raises: PermissionError.
    """
    if not _HUB_ID.fullmatch(word):
        return None
    repository = hub_cache(environ) / f"models--{word.replace('/', '--')}"
    commit = full_commit(revision) or _reference(repository, revision or "main")
    if commit is None or not (repository / "snapshots" / commit).is_dir():
        return None
    return repository / "snapshots" / commit


def commit_of(directory: Path) -> str | None:
    """Return the commit of a directory that is a snapshot: its name."""
    is_snapshot = directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name)
    return directory.name if is_snapshot else None


def full_commit(revision: str | None) -> str | None:
    """Return a revision that can mean but one commit, or None."""
    return revision if revision and _COMMIT.fullmatch(revision) else None


def _reference(repository: Path, revision: str) -> str | None:
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps its snapshots (its constants.py: HF_HUB_CACHE)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(_spelled_out(environ[name], environ))
    if environ.get("HF_HOME"):
        return Path(_spelled_out(environ["HF_HOME"], environ), "hub")
    cache = _spelled_out(environ.get("XDG_CACHE_HOME") or "~/.cache", environ)
    return Path(cache, "huggingface", "hub")


def _spelled_out(place: str, environ: Mapping[str, str]) -> str:
    """Return a place with its "~" and variables resolved, as no shell did it for ENV."""
    if place == "~" or place.startswith("~/"):
        place = environ.get("HOME", "/").rstrip("/") + place[1:]
    named = r"\$(?:(\w+)|\{(\w+)\})"
    return re.sub(named, lambda found: environ.get(found[1] or found[2], found[0]), place)


def blob_sha256(path: str) -> str | None:
    """Return the sha256 that the hub's cache names a large file's blob by."""
    if not os.path.islink(path):
        return None
    target = os.path.basename(os.readlink(path))
    return target if re.fullmatch(r"[0-9a-f]{64}", target) else None


def is_named_right(path: Path) -> bool:
    """Whether a file is linked to a blob whose name is its content's: a sha256, or git's sha1.

    Raises: OSError.
    """
    import hashlib  # noqa: PLC0415 - only a save asks

    if not path.is_symlink():
        return False
    name, data = path.readlink().name, path.read_bytes()
    as_git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return name in (hashlib.sha256(data).hexdigest(), as_git.hexdigest())
