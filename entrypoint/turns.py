"""Taking turns among nodes: one saves for all, and only so many copy from a shared store at once.

Only a store that is a directory, and answers, knows turns. They save work and never carry
correctness: where no ticket can be written, or the bound has passed, the step is taken anyway.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from entrypoint import steps
from entrypoint.assess import Assessment, Boot, look_far
from entrypoint.checkpoint.finding import Complete, Unreachable
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.plan import Action
from entrypoint.store.directory import DirectoryStore

READERS_SECONDS: Final = 900.0
"""Longest wait for a turn to copy: by then vLLM had loaded the source."""


def save(boot: Boot, assessment: Assessment, action: Action) -> Manifest | Complete:
    """Save a checkpoint; or return the one that another node has published meanwhile.

    Only with `--publish`: nobody waits for what would not come.
    """
    from entrypoint.store import lease  # noqa: PLC0415 - a hit takes no turns

    store, settings, situation = assessment.shared_store, boot.settings, assessment.situation
    if not isinstance(store, DirectoryStore) or isinstance(situation.shared, Unreachable):
        return steps.save_here(boot, assessment, action)
    if not settings.publish or situation.no_copy is not None:
        # Who may not copy, or could not, waits for nothing.
        return steps.save_here(boot, assessment, action)
    what = f"save-{steps.subject(assessment)}"
    published = _published(boot, assessment, store)
    with lease.queue(store.root, what, store.dir_mode, store.file_mode) as ticket:
        found = ticket.wait(1, settings.save_timeout, published, _say(boot)).found
        return found or steps.save_here(boot, assessment, action)


def copy(boot: Boot, assessment: Assessment, action: Action) -> Manifest:
    """Copy from the shared store, as one of `--shared-readers` at most."""
    from entrypoint.store import lease  # noqa: PLC0415 - a hit takes no turns

    store, most = assessment.shared_store, boot.settings.shared_readers
    if not most or not isinstance(store, DirectoryStore):
        return steps.copy_here(boot, assessment, action)
    with lease.queue(store.root, "readers", store.dir_mode, store.file_mode) as ticket:
        ticket.wait(most, READERS_SECONDS, on_wait=_say(boot))
        return steps.copy_here(boot, assessment, action)


def _say(boot: Boot) -> Callable[[str], None]:
    def say(text: str) -> None:
        boot.log.line("lease.wait", text)
        boot.status.phase("waiting", text)

    return say


def _published(
    boot: Boot, assessment: Assessment, store: DirectoryStore
) -> Callable[[], Complete | None]:
    """Return how to look for a checkpoint that fits, as often as one likes.

    The store is searched only when something in it was renamed since.
    """
    seen = -1

    def look() -> Complete | None:
        nonlocal seen
        with contextlib.suppress(OSError):
            changed = os.stat(store.root).st_mtime_ns
            if changed == seen:
                return None
            seen = changed
        found = look_far(boot, assessment)
        return found if isinstance(found, Complete) else None

    return look
