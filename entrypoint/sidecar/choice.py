"""What there is to fetch, to publish and to scrub, decided on what was seen. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from entrypoint.config import Prove
from entrypoint.sidecar.view import COMPLETE, DAMAGED, Seen


class Fetch(NamedTuple):
    """A checkpoint of the shared store that should be here, and for which ranks.

    `replaces`: the local checkpoint of the same bytes that is damaged, "" where there is none.
    """

    name: str
    content: str
    ranks: tuple[int, ...]
    replaces: str = ""


class Past(NamedTuple):
    """When what was fetched, by its content; the time now; and how long a copy is to last.

    In seconds; the first two since 1970.
    """

    fetched: Mapping[str, float]
    now: float = 0.0
    interval: float = 0.0

    def forbids(self, content: str, twin: Seen | None) -> bool:
        """Tell whether it must not be fetched once more, where `twin` of the same bytes is here."""
        when = self.fetched.get(content)
        return when is not None and (twin is None or self.now - when < self.interval)


def to_fetch(
    local: Sequence[Seen], shared: Sequence[Seen], past: Past, prove: Prove
) -> list[Fetch]:
    """Return of each family that this node serves what is newer in the shared store, newest first.

    Newer than every sound one here: so what is damaged here comes again, unless somebody still
    uses it; what only could not be read stays as it is. What was fetched once and is gone had to
    make way for another: it is left to the boot that wants it. What was fetched and is damaged
    again soon after, is damaged by more than chance. Only what boots here would serve, as far as
    that is known: of a vLLM and format that one has served, and proved where `prove` asks for it.
    """
    made_by = {each.made_by for each in local if each.served}
    found: list[tuple[float, Fetch]] = []
    for family, here in _families(local):
        if not any(each.served for each in here):
            continue
        newest = max((each.created for each in here if each.state == COMPLETE), default=-math.inf)
        there = [
            each
            for each in shared
            if each.family == family and each.state == COMPLETE and each.made_by in made_by
            if each.proved or _goes_unproved(here, prove)
        ]
        best = max(there, key=_age, default=None)
        if best is None or best.created <= newest:
            continue
        twin = next((each for each in here if each.content == best.content), None)
        if past.forbids(best.content, twin):
            continue
        if twin is not None and (twin.running or twin.state != DAMAGED):
            continue
        # A torn note says of no rank that it is here.
        whole = max((each for each in here if each.ranks), key=_age, default=None)
        if whole is None:
            continue
        fetch = Fetch(best.name, best.content, whole.ranks, twin.name if twin else "")
        found.append((best.created, fetch))
    return [fetch for _, fetch in sorted(found, reverse=True)]


def _goes_unproved(family: Sequence[Seen], prove: Prove) -> bool:
    """Tell whether a boot here would serve one that nobody proved.

    What must be proved is vLLM's to say: with `auto`, one that was served without tells the same.
    """
    served_unproved = any(each.served and not each.proved for each in family)
    return prove == "never" or (prove == "auto" and served_unproved)


def to_publish(
    local: Sequence[Seen], shared: Sequence[Seen], host: str, published: Collection[str]
) -> list[Seen]:
    """Return the saves of this host that the shared store lacks, and that may be served.

    Of each family the newest alone, whole, and proved, or loaded by a boot that asked for no proof.
    What was `published` once, and is not there any more, somebody has taken away.
    """
    there = {each.key for each in shared if each.state == COMPLETE}
    found = []
    for _, here in _families(local):
        sound = [each for each in here if each.state == COMPLETE]
        newest = max(sound, key=_age, default=None)
        if newest is None or newest.host != host or len(newest.ranks) < newest.world:
            continue
        if newest.key in there or newest.content in published:
            continue
        if newest.proved or newest.loaded:
            found.append(newest)
    return found


def to_scrub(
    local: Sequence[Seen], scrubbed: Mapping[str, float], now: float, interval: float
) -> Seen | None:
    """Return whom to read next: who was read longest ago, if that is `interval` seconds or more.

    `scrubbed` says when, by the manifest's digest; who never was, comes first.
    """
    sound = [each for each in local if each.state == COMPLETE]
    oldest = min(sound, key=lambda each: scrubbed.get(each.digest, 0.0), default=None)
    if oldest is None or now - scrubbed.get(oldest.digest, 0.0) < interval:
        return None
    return oldest


def _families(local: Sequence[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """Yield each family with all of it that can be read."""
    for family in dict.fromkeys(each.family for each in local if each.family):
        yield family, [each for each in local if each.family == family]


def _age(seen: Seen) -> tuple[float, str]:
    return seen.created, seen.name
