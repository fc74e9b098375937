"""The facts that decide what stays in a store: taken from it, and from the state directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrypoint.checkpoint.entry import HAVE
from entrypoint.checkpoint.finding import Damaged, Unreachable
from entrypoint.checkpoint.inspect import ranks_in, read_manifest
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.errors import ManifestError, StoreError
from entrypoint.state import process
from entrypoint.state.attempts import UNUSED, Use, uses
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections
from entrypoint.store import lock, pins, space, tree
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import check
from entrypoint.store.retention import DAMAGED, Candidate, family_of


def survey(store: DirectoryStore, state: Path) -> list[Candidate]:
    """Return the facts about every checkpoint of a store, newest first. Raises: StoreError."""
    known, pinned = uses_here(state), pins.pinned(store.root)
    found = []
    for name in store.names():
        candidate = _look_at(store.path(name), state, known)
        if candidate is not None:
            found.append(candidate._replace(pinned=name in pinned))
    return found


def uses_here(state: Path) -> Mapping[str, Use]:
    """Return what boots of this node have done with each manifest, by its digest.

    Raises: StoreError where the ledger is there and cannot be read: who serves must be known.
    """
    ledger = Ledger(state)
    for path in (ledger.older, ledger.path):
        try:
            path.open("rb").close()
        except FileNotFoundError:
            # No boot yet, or none since the ledger began a new file.
            continue
        except OSError as error:
            hint = "run as the service user: only the ledger tells who serves, where locks lie"
            raise StoreError(f"{path}: {error.strerror}", hint=hint) from error
    return uses(ledger.entries(), process.host_boot())


def _look_at(directory: Path, state: Path, known: Mapping[str, Use]) -> Candidate | None:
    try:
        made = (directory / MANIFEST).lstat().st_mtime
        size = space.bytes_of(directory)
        manifest = read_manifest(directory)
        stray = _stray(directory, manifest)
        use = known.get(manifest.digest, UNUSED)
        flaw = _flaw(directory, manifest, state, use)
    except FileNotFoundError:
        # Taken away since it was listed.
        return None
    except (OSError, ManifestError) as error:
        return Candidate(directory.name, 0, "", "", 0.0, 0.0, foreign=f"cannot be read: {error}")
    in_use, unknown = who_uses(directory, use)
    return Candidate(
        name=directory.name,
        size=size,
        key=manifest.key.digest,
        family=family_of(manifest),
        made=made,
        used=max(made, use.served),
        loaded=use.loaded,
        maker=(manifest.key.vllm, manifest.key.format),
        running=in_use,
        flaw=flaw,
        foreign=f"it holds {stray}, which is none of its files" if stray else unknown,
    )


def _stray(directory: Path, manifest: Manifest) -> str:
    """Return the first file that somebody else has put there, or "". Raises: OSError."""
    own = {entry.path for entry in manifest.files} | {MANIFEST, HAVE}
    return min((path for path, _ in tree.files_beneath(directory) if path not in own), default="")


def _flaw(directory: Path, manifest: Manifest, state: Path, use: Use) -> str:
    """Return why no boot would serve it, or "". Raises: OSError."""
    rejection = Rejections(state).flaw(manifest.content, is_loaded=use.loaded)
    if rejection is not None:
        return rejection.kind
    match check(directory, manifest, Memory(state), ranks_in(directory, manifest)):
        case Damaged():
            return DAMAGED
        case Unreachable(error=error):
            raise OSError(error)
        case _:
            return ""


def who_uses(directory: Path, use: Use) -> tuple[str, str]:
    """Return who uses a checkpoint, and why that cannot be known; "" where it is not so."""
    alive = [pid for pid, start in use.processes if process.is_alive(pid, start)]
    if alive:
        return f"process {alive[0]} serves it", ""
    with lock.sole(directory) as obstacle:
        if isinstance(obstacle, BlockingIOError):
            return "a process holds its lock", ""
        return "", f"its lock is not to be had: {obstacle.strerror}" if obstacle else ""
