"""A checkpoint's record: what became of the boots before, and what follows from that."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Rejected
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.plan import Action
from entrypoint.state import process, stops
from entrypoint.state.attempts import SET_ASIDE, Entry, failures_in_row, never_loaded
from entrypoint.state.ledger import Ledger
from entrypoint.state.rejections import Rejections
from entrypoint.store import lock


def read(boot: Boot, manifest: Manifest) -> Sequence[Entry]:
    """Return what is known of the latest boots from a checkpoint."""
    state_dir = boot.settings.state_dir
    return [*Ledger(state_dir).recent_about(manifest.digest), *stops.told(state_dir)]


def against(
    boot: Boot, assessment: Assessment, action: Action, entries: Sequence[Entry]
) -> Rejected | int:
    """Return the checkpoint as rejected if too many boots died; else how many died loading it."""
    assert action.manifest is not None
    name, most = action.manifest.name, boot.settings.quarantine_after
    failures = died_loading(action, entries)
    if failures >= most:
        reason = f"{failures} boots in a row died while loading it"
        return Rejected(name, "quarantined", reason)
    asked = assessment.resolution.asked if assessment.resolution else ""
    row = died_before(action, asked, entries)
    if row >= most and _may_serve_source(boot, assessment):
        reason = f"{row} boots in a row died before they began to load it"
        return Rejected(name, "never-loaded", reason)
    return failures


def died_loading(action: Action, entries: Sequence[Entry]) -> int:
    """Return how many boots in a row died on it; none while a server runs that has loaded it."""
    assert action.manifest is not None
    may_live = _who_may_live(Path(str(action.path)))
    return failures_in_row(entries, action.manifest.digest, process.host_boot(), may_live)


def died_before(action: Action, asked: str, entries: Sequence[Entry]) -> int:
    """Return how many in a row, by what vLLM was asked, died before they began to load it."""
    assert action.manifest is not None
    may_live = _who_may_live(Path(str(action.path)))
    return never_loaded(entries, action.manifest.digest, asked, process.host_boot(), may_live)


def keep(boot: Boot, manifest: Manifest, found: Rejected) -> None:
    """Say that the checkpoint is not served, and leave for later boots what they must know."""
    state_dir = boot.settings.state_dir
    if found.kind == "quarantined":
        Rejections(state_dir).add(manifest.content, found.kind, found.reason)
        hint = f"`shardboot unreject {manifest.name}` gives it another chance"
    else:
        about: dict[str, Json] = {"boot": boot.log.boot, "manifest": manifest.digest}
        Ledger(state_dir).append(about | {"event": SET_ASIDE, "time": round(time.time(), 3)})
        hint = "perhaps for no fault of its own, so the next boot tries it again"
    boot.log.line(f"local.{found.kind}", f"{manifest.name}: {found.reason}; {hint}")


def _may_serve_source(boot: Boot, assessment: Assessment) -> bool:
    """Tell whether vLLM would at least begin to load the source, and the operator lets it."""
    here = assessment.source.here
    is_nowhere = here.directory is None and os.path.isabs(here.word)
    is_there = assessment.situation.has_source and not here.timed_out and not is_nowhere
    return is_there and "refuse" not in (boot.policy.on_failure, boot.policy.on_miss)


def _who_may_live(checkpoint: Path) -> Callable[[Json, Json, Json], bool]:
    """Return how to ask whether the server of an earlier boot from a checkpoint may still run."""
    here = process.namespace()
    is_held = functools.cache(lambda: not lock.is_free(checkpoint))

    def may_live(pid: Json, start: Json, namespace: Json) -> bool:
        if here and namespace == here:
            return process.is_alive(pid, start)
        # Of another pid namespace only the lock tells, and not of whom.
        return is_held()

    return may_live
