"""What there is to fetch, repair, publish and scrub, decided on what was seen. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import Version

from entrypoint.config import Prove
from entrypoint.sidecar.engines import Engines, released
from entrypoint.sidecar.view import COMPLETE, DAMAGED, Seen


class Fetch(NamedTuple):
    """A checkpoint of the shared store that should be here, and for which ranks."""

    name: str
    content: str
    ranks: tuple[int, ...]


class Mending(NamedTuple):
    """A local checkpoint that is damaged, and its name in the shared store, which has it, too."""

    name: str
    content: str
    there: str


class Past(NamedTuple):
    """When what was done, by its content; the time now; and how long that is to last.

    In seconds; the first two since 1970.
    """

    done: Mapping[str, float]
    now: float = 0.0
    interval: float = 0.0

    def forbids(self, content: str) -> bool:
        """Tell whether it was done so short a time ago that it must not be done once more."""
        when = self.done.get(content)
        return when is not None and self.now - when < self.interval


def to_fetch(
    local: Sequence[Seen], shared: Sequence[Seen], fetched: Collection[str], prove: Prove
) -> list[Fetch]:
    """Return of each family that this node serves what is newer in the shared store, newest first.

    Of what was made for a vLLM and format that have served here, the newest; and of what is for a
    later one, as an upgrade will want it, the newest for the latest. Newer than every sound one
    like it here, and not here in any state: what is damaged is repaired. What was `fetched` once
    and is gone had to make way for another: it is left to the boot that wants it. Nothing without
    a proof where `prove` asks for one.
    """
    engines = Engines.of(each.made_by for each in local if each.served)
    found: list[tuple[float, Fetch]] = []
    for family, here in _families(local):
        # A torn note says of no rank that it is here.
        whole = max((each for each in here if each.ranks), key=_age, default=None)
        if whole is None or not any(each.served for each in here):
            continue
        there = [
            each
            for each in shared
            if each.family == family and (each.proved or _goes_unproved(here, prove))
        ]
        known = {*fetched, *(each.content for each in here)}
        newer = (
            _newer(here, there, lambda each: engines.has(each.made_by), _age),
            _newer(here, there, lambda each: engines.is_ahead(each.made_by), _release),
        )
        found += [
            (best.created, Fetch(best.name, best.content, whole.ranks))
            for best in newer
            if best is not None and best.content not in known
        ]
    return [fetch for _, fetch in sorted(found, reverse=True)]


def _newer(
    here: Iterable[Seen],
    there: Iterable[Seen],
    is_meant: Callable[[Seen], bool],
    order: Callable[[Seen], Any],
) -> Seen | None:
    """Return the last there of those that are meant, in this order, if it is behind all here."""
    ours, theirs = (
        max((e for e in seen if e.state == COMPLETE and is_meant(e)), key=order, default=None)
        for seen in (here, there)
    )
    return theirs if theirs and (ours is None or order(theirs) > order(ours)) else None


def to_repair(local: Sequence[Seen], shared: Sequence[Seen], past: Past) -> list[Mending]:
    """Return what is damaged here, and lies in the shared store as well.

    What was repaired and is damaged again soon after, is damaged by more than chance. Which ranks
    are here must be known.
    """
    there = {each.content: each.name for each in shared if each.state == COMPLETE}
    return [
        Mending(each.name, each.content, there[each.content])
        for each in local
        if each.state == DAMAGED and each.ranks and each.content in there
        if not past.forbids(each.content)
    ]


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

    Of each family, and each vLLM, the newest alone, whole, and with a proof, which goes along, or
    loaded by a boot that asked for none. What was `published` once, and is not there any more,
    somebody has taken away.
    """
    there = [each for each in shared if each.state == COMPLETE]
    found = []
    for newest in _newest(local):
        if newest.host != host or len(newest.ranks) < newest.world:
            continue
        if newest.content in published or any(_stands_for(each, newest) for each in there):
            continue
        if newest.proved or newest.loaded:
            found.append(newest)
    return found


def _stands_for(other: Seen, newest: Seen) -> bool:
    """Tell whether other nodes are served as well by one that the shared store has.

    Without a proof of its own it would be of no use to those that ask for one.
    """
    return other.key == newest.key and (other.sealed or not newest.proved)


def to_prove(local: Sequence[Seen], tried: Collection[str], *, on_accelerators: bool) -> list[Seen]:
    """Return of each family, and each vLLM, the newest, if it is whole and nobody has proved it.

    What was `tried` is left alone, and so is what runs on an accelerator, unless that is asked for:
    of its memory nobody here knows how much is free.
    """
    found = []
    for newest in _newest(local):
        if newest.proved or len(newest.ranks) < newest.world:
            continue
        is_cpus = newest.made_for is not None and newest.made_for.platform.startswith("cpu")
        if newest.content not in tried and (is_cpus or on_accelerators):
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


def _newest(local: Sequence[Seen]) -> Iterator[Seen]:
    """Yield of each family the newest sound one for each vLLM: an upgrade's is no rival."""
    for _, here in _families(local):
        sound = [each for each in here if each.state == COMPLETE]
        for maker in dict.fromkeys(each.made_by for each in sound):
            yield max((each for each in sound if each.made_by == maker), key=_age)


def _age(seen: Seen) -> tuple[float, str]:
    return seen.created, seen.name


def _release(seen: Seen) -> tuple[tuple[Version, int], float, str]:
    return released(seen.made_by), seen.created, seen.name
