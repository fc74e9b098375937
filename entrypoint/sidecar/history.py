"""What the ledger tells of this node's boots: the latest, and all, counted. Pure but `History`."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.inspect import Stamp, stamp_of
from entrypoint.insight.timeline import Timeline, timelines
from entrypoint.state.attempts import Entry, Use, tier_of, time_in
from entrypoint.state.ledger import Ledger
from entrypoint.store.survey import uses_here

_TOLD: Final = ("fell-back", "healthy", "loaded", "loading")
"""What is noted after exec, and tells most; a later one is of those that came before it."""

LATEST: Final = 10
"""So many boots are shown; of others only the number."""


class Booted(NamedTuple):
    """One boot: when, in seconds since 1970, of what, from where, how far it came, and why.

    `timeline` is what it did when; known of the latest boots alone.
    """

    boot: str
    time: float
    of: str
    tier: str
    outcome: str
    reason: str
    is_refused: bool
    timeline: Timeline | None = None

    @property
    def spent(self) -> Mapping[str, float]:
        """The seconds that it took, by the name of the phase."""
        phases = self.timeline.phases if self.timeline else ()
        spent = dict.fromkeys((phase.name for phase in phases), 0.0)
        for phase in phases:
            spent[phase.name] += phase.seconds
        return spent


class Told(NamedTuple):
    """All that is told of boots.

    `uses`: what they did with each checkpoint, by its manifest's digest. `boots`: how many, by
    tier and outcome. `refusals`: how many got no checkpoint, by the reason. `latest`: newest first.
    """

    uses: Mapping[str, Use]
    boots: Mapping[tuple[str, str], int]
    refusals: Mapping[str, int]
    latest: Sequence[Booted] = ()


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
            entries = [*self._ledger.entries()]
            uses, boots = uses_here(self._ledger.root), booted(entries)
            latest = [*timed(boots[: -LATEST - 1 : -1], entries)]
            self._told = Told(uses, *counted(boots), latest)
            self._stamps = stamps
        return self._told


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None


def counted(boots: Sequence[Booted]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return how many boots came to what, by tier and outcome; and why some got no checkpoint."""
    outcomes = Counter((boot.tier, boot.outcome) for boot in boots)
    return outcomes, Counter(boot.reason for boot in boots if boot.is_refused)


def booted(entries: Iterable[Mapping[str, Json]]) -> list[Booted]:
    """Return all boots that lines of the ledger tell of, in their order."""
    attempts: dict[str, Mapping[str, Json]] = {}
    events: dict[str, set[str]] = {}
    for entry in entries:
        boot, event = str(entry.get("boot")), str(entry.get("event"))
        if event == "attempt":
            attempts[boot] = entry
        events.setdefault(boot, set()).add(event)
    return [_booted(boot, entry, events[boot]) for boot, entry in attempts.items()]


def timed(boots: Iterable[Booted], entries: Iterable[Entry]) -> Iterator[Booted]:
    """Yield boots with what they did when, by lines of the ledger."""
    boots = [*boots]
    names = {boot.boot for boot in boots}
    told = [entry for entry in entries if entry.get("boot") in names]
    # Whether one goes on is not asked: what it does now has not ended.
    found = {each.boot: each for each in timelines(told, (), lambda _: False, 0.0)}
    for boot in boots:
        yield boot._replace(timeline=found.get(boot.boot))


def _booted(boot: str, attempt: Mapping[str, Json], events: set[str]) -> Booted:
    of = attempt.get("family_name") or attempt.get("checkpoint")
    return Booted(
        boot,
        time_in(attempt, "time") or 0.0,
        of if isinstance(of, str) else "",
        tier_of(attempt),
        _outcome(attempt, events),
        str(attempt.get("reason")),
        attempt.get("action") in ("refuse", "serve-source"),
    )


def _outcome(attempt: Mapping[str, Json], events: set[str]) -> str:
    if attempt.get("action") == "refuse":
        return "refused"
    return next((event for event in _TOLD if event in events), "started")
