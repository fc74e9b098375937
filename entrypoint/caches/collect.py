"""Taking away caches that nobody needs any more: by one rename into the trash, then deleted."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from entrypoint.caches.heal import sole, take_away
from entrypoint.caches.place import CHECKPOINT, checkpoint_of, root_of
from entrypoint.caches.retention import Kept, judge
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.state import process
from entrypoint.state.ledger import Ledger
from entrypoint.store import sweep, trash, tree
from entrypoint.store.retention import Verdict

_PATH_BYTES: Final = 4096


def collect(
    state: Path, local: Path, grace: float, most_bytes: int, *, dry_run: bool
) -> list[Verdict]:
    """Take away caches by `retention`'s rules, and what dead fetches left; return all verdicts.

    `local` is the local store. Those of a running server stay: its lock tells, or the ledger where
    locks lie. With `dry_run` nothing is changed.
    """
    root = root_of(state)
    found = survey(root, local, Ledger(state).entries())
    verdicts = judge(found, grace, most_bytes, time.time())
    if dry_run:
        return verdicts
    verdicts = [_take(root, each) if each.is_collected else each for each in verdicts]
    sweep.discard(root, sweep.abandoned(root, grace), tree.DIR_MODE)
    trash.empty(root)
    return verdicts


def survey(root: Path, local: Path, entries: Iterable[Mapping[str, Json]]) -> list[Kept]:
    """Return the facts about all caches; what is not named as ours is passed over."""
    serving = _serving(entries)
    names = sorted(os.listdir(root)) if root.is_dir() else []
    found = [_look_at(root / name, local, serving) for name in names if checkpoint_of(name)]
    return [each for each in found if each is not None]


def _serving(entries: Iterable[Mapping[str, Json]]) -> Mapping[str, Json]:
    """Return the checkpoints that a process which lives was given, and that process."""
    host_boot = process.host_boot()
    return {
        str(entry.get("checkpoint")): entry.get("pid")
        for entry in entries
        if entry.get("event") == "attempt"
        and entry.get("host_boot") == host_boot
        and process.is_alive(entry.get("pid"), entry.get("pid_start"))
    }


def _look_at(place: Path, local: Path, serving: Mapping[str, Json]) -> Kept | None:
    checkpoint = checkpoint_of(place.name)
    running = (
        f"process {serving[checkpoint]} serves its checkpoint" if checkpoint in serving else ""
    )
    try:
        used = place.lstat().st_mtime
        size = sum(status.st_size for _, status in tree.files_beneath(place))
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return None
        return Kept(place.name, 0, 0.0, foreign=f"cannot be read: {error}")
    foreign = ""
    with sole(place) as obstacle:
        if isinstance(obstacle, BlockingIOError):
            running = running or "a process holds its lock"
        elif obstacle is not None:
            foreign = f"its lock is not to be had: {obstacle.strerror}"
    is_orphan = _is_gone(_path_of(place, local / checkpoint))
    return Kept(place.name, size, used, is_orphan, running, foreign)


def _is_gone(checkpoint: Path) -> bool:
    """Tell whether it surely is: where its store lists nothing, a mount may be away."""
    try:
        (checkpoint / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        with contextlib.suppress(OSError):
            return bool(os.listdir(checkpoint.parent))
    except OSError:
        # It cannot be told.
        return False
    return False


def _path_of(place: Path, otherwise: Path) -> Path:
    """Return where the checkpoint lay, as it was noted when the place was made."""
    try:
        return Path(os.fsdecode(read_bounded(place / CHECKPOINT, _PATH_BYTES)))
    except (OSError, ValueError):
        return otherwise


def _take(root: Path, verdict: Verdict) -> Verdict:
    with sole(root / verdict.name) as obstacle:
        if isinstance(obstacle, FileNotFoundError):
            return verdict.kept("gone", "somebody else has taken it away")
        if obstacle is not None:
            return verdict.kept("running", f"its lock is not to be had: {obstacle.strerror}")
        try:
            take_away(root / verdict.name)
        except OSError as error:
            return verdict.kept("busy", f"{root / verdict.name}: {error.strerror}")
    return verdict
