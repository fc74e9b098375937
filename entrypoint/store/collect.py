"""Making room: collecting what nobody needs any more, and evicting when a step is short of space.

Facts are taken, `retention` decides, and only then something is moved: away by one rename into the
trash, deleted after that. Killed at any instant, nothing half is listed, and the next run goes on.

A checkpoint goes only while its exclusive lock is held here *and* no process that the state
directory tells of still serves it: where locks lie, the second must do.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from entrypoint.checkpoint.inspect import read_manifest
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.errors import ManifestError, SpaceError
from entrypoint.state import process
from entrypoint.state.attempts import UNUSED
from entrypoint.store import lock, pins, space, sweep, trash
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.retention import Candidate, Rules, Verdict, choose, duration, judge
from entrypoint.store.survey import survey, uses_here

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Stayed(NamedTuple):
    """Staging that should go and does not: `busy` or `denied`, and in words."""

    name: str
    reason: str
    text: str


class Collection(NamedTuple):
    """What a run did, or would do: a verdict on each checkpoint, newest first.

    `swept` is staging that nobody builds in any more, and `stayed` what of that could not be taken
    away; `trash`, what waits to be deleted: busy, as with a file that a reader on NFS holds open,
    until a later run.
    """

    verdicts: tuple[Verdict, ...]
    swept: tuple[str, ...]
    trash: tuple[str, ...]
    stayed: tuple[Stayed, ...] = ()


def collect(store: DirectoryStore, state: Path, rules: Rules, *, dry_run: bool) -> Collection:
    """Take away what `rules` do not keep, and delete abandoned staging and the trash.

    With `dry_run` nothing in the store is changed. Raises: StoreError.
    """
    candidates = survey(store, state)
    verdicts = judge(candidates, rules, time.time())
    swept = sweep.abandoned(store.root, rules.grace)
    stayed: dict[Path, OSError] = {}
    if not dry_run:
        verdicts = [
            _take(store, state, candidate, verdict) if verdict.is_collected else verdict
            for candidate, verdict in zip(candidates, verdicts, strict=True)
        ]
        stayed = sweep.discard(store.root, swept, store.dir_mode)
        trash.empty(store.root)
    return Collection(
        tuple(verdicts),
        swept=tuple(path.name for path in swept if path not in stayed),
        trash=tuple(path.name for path in trash.waiting(store.root)),
        stayed=tuple(Stayed(path.name, *_why(error, path)) for path, error in stayed.items()),
    )


def make_room(
    store: DirectoryStore,
    state: Path,
    needed: int,
    limits: space.Limits,
    wanted: str | None,
    say: Callable[[str], None],
    staged: Path | None = None,
    rules: Rules | None = None,
) -> None:
    """Make sure that `needed` more bytes fit, by evicting others than `wanted` if it must be.

    With `rules`, only those that these do not keep. The bytes are for the staging `staged`, which
    stays. Decided first: where all that may go would not be enough, nothing goes. `say` hears of
    each.
    Raises: SpaceError with the numbers; StoreError.
    """
    if space.shortage(store.root, needed, limits) is None:
        return
    orphaned = [path for path in sweep.orphaned(store.root) if path != staged]
    stayed = sweep.discard(store.root, orphaned, store.dir_mode)
    for left in orphaned:
        if left not in stayed:
            say(f"{left.name}: what a builder who died has left")
    trash.empty(store.root)
    short = space.shortage(store.root, needed, limits)
    if short is None:
        return
    candidates = survey(store, state)
    if rules is not None:
        verdicts = judge(candidates, rules, time.time())
        candidates = [c for c, v in zip(candidates, verdicts, strict=True) if v.is_collected]
    victims, available = choose(candidates, short.missing, wanted)
    if not victims:
        text = f"{short.text}; evicting all that may go would free {available}"
        raise SpaceError(text, hint=f"stop or unpin what can be spared, or {space.HINT}")
    stay = ""
    for victim in victims:
        chosen = Verdict(victim.name, victim.size, is_collected=True, reason="evicted", text="")
        verdict = _take(store, state, victim, chosen)
        if verdict.is_collected:
            ago = duration(max(0.0, time.time() - victim.used))
            say(f"{victim.name}: {victim.size} bytes, last made use of {ago} ago")
        else:
            stay += f"; {victim.name} stays after all: {verdict.text}"
    trash.empty(store.root)
    short = space.shortage(store.root, needed, limits)
    if short is not None:
        raise SpaceError(short.text + stay, hint=space.HINT)


def _take(store: DirectoryStore, state: Path, chosen: Candidate, verdict: Verdict) -> Verdict:
    """Move one checkpoint into the trash, unless that must not be, or cannot, any more."""
    directory = store.path(chosen.name)
    with lock.sole(directory) as obstacle:
        if isinstance(obstacle, FileNotFoundError):
            return verdict.kept("gone", "somebody else has taken it away")
        if obstacle is not None:
            # A server that just came, or another collector at the same one.
            return verdict.kept("running", f"its lock is not to be had: {obstacle.strerror}")
        try:
            why = _objection(store, state, chosen)
            if why is None:
                trash.retire(store.root, chosen.name, store.dir_mode)
                return verdict
        except ManifestError as error:
            why = ("foreign", str(error))
        except OSError as error:
            why = _why(error, directory)
    return verdict.kept(*why)


def _why(error: OSError, path: Path) -> tuple[str, str]:
    """Return the reason that something could not be taken away, and in words."""
    return "denied" if error.errno in _DENIED else "busy", f"{path}: {error.strerror}"


def _objection(store: DirectoryStore, state: Path, chosen: Candidate) -> tuple[str, str] | None:
    """Return what has changed since the survey and lets it stay. Raises: OSError, ManifestError."""
    directory = store.path(chosen.name)
    if (directory / MANIFEST).lstat().st_mtime != chosen.made:
        return "young", "another one has taken its name"
    if chosen.name in pins.pinned(store.root):
        return "pinned", "somebody has just pinned it"
    use = uses_here(state).get(read_manifest(directory).digest, UNUSED)
    if any(process.is_alive(pid, start) for pid, start in use.processes):
        return "running", "a process has just begun to serve it"
    return None
