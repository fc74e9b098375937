"""What the ledger tells of this node's boots, counted. The counting is pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint.boot import TIERS
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.inspect import Stamp, stamp_of
from entrypoint.state.attempts import Use
from entrypoint.state.ledger import Ledger
from entrypoint.store.survey import uses_here

_TOLD: Final = ("fell-back", "healthy", "loaded", "loading")
"""What is noted after exec, and tells most; a later one is of those that came before it."""


class Told(NamedTuple):
    """All that is told of boots.

    `uses`: what they did with each checkpoint, by its manifest's digest. `boots`: how many, by
    tier and outcome. `refusals`: how many got no checkpoint, by the reason.
    """

    uses: Mapping[str, Use]
    boots: Mapping[tuple[str, str], int]
    refusals: Mapping[str, int]


NOTHING: Final = Told({}, {}, {})


class History:
    """The ledger under `root`, read again only when it has changed."""

    def __init__(self, root: Path) -> None:
        self._ledger = Ledger(root)
        self._stamps: tuple[Stamp | None, ...] = ()
        self._told = NOTHING

    def told(self) -> Told:
        """Return what it tells now. Raises: StoreError where it is there and cannot be read."""
        stamps = tuple(_stamp(path) for path in (self._ledger.older, self._ledger.path))
        if stamps != self._stamps:
            uses = uses_here(self._ledger.root)
            self._told = Told(uses, *counted(self._ledger.entries()))
            self._stamps = stamps
        return self._told


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None


def counted(
    entries: Iterable[Mapping[str, Json]],
) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return how many boots came to what, by tier and outcome; and why some got no checkpoint."""
    attempts: dict[str, Mapping[str, Json]] = {}
    events: dict[str, set[str]] = {}
    for entry in entries:
        boot, event = str(entry.get("boot")), str(entry.get("event"))
        if event == "attempt":
            attempts[boot] = entry
        events.setdefault(boot, set()).add(event)
    boots = Counter((_tier(entry), _outcome(entry, events[b])) for b, entry in attempts.items())
    refused = [e for e in attempts.values() if e.get("action") in ("refuse", "serve-source")]
    return boots, Counter(str(entry.get("reason")) for entry in refused)


def _tier(attempt: Mapping[str, Json]) -> str:
    """Return where the weights came from: local, shared, saved or source; else none."""
    action, after = str(attempt.get("action")), attempt.get("after")
    if action == "reuse" and isinstance(after, list) and after:
        action = str(after[-1]).partition(":")[0]
    return TIERS.get(action, "none")


def _outcome(attempt: Mapping[str, Json], events: set[str]) -> str:
    if attempt.get("action") == "refuse":
        return "refused"
    return next((event for event in _TOLD if event in events), "started")
