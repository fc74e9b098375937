"""What stays in a store and what goes, decided from plain facts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from entrypoint.checkpoint.layout import generation_of
from entrypoint.checkpoint.manifest import Manifest

DAMAGED = "damaged"
"""The flaw of a checkpoint whose files are not what its manifest says; other flaws are kinds of
rejection."""


class Candidate(NamedTuple):
    """One checkpoint, as far as it matters here. Times are seconds since 1970, sizes bytes.

    `used` is when it was made or last served, whichever is later; `loaded`, whether vLLM is known
    to have loaded it. `maker` is the vLLM that it is for, and our format. `flaw` says why no boot
    would serve it, `running` who uses it, `foreign` why it is not ours to touch; "" where that is
    not so.
    """

    name: str
    size: int
    key: str
    family: str
    made: float
    used: float
    loaded: bool = False
    maker: tuple[str, int] = ("", 0)
    pinned: bool = False
    running: str = ""
    flaw: str = ""
    foreign: str = ""


class Rules(NamedTuple):
    """How long things stay, in seconds.

    `grace`: since a checkpoint was made or served. `settle`: since the one that replaces it was
    made, where nobody here can know whether that one serves well.
    """

    grace: float
    settle: float = 0.0


class Verdict(NamedTuple):
    """Whether a checkpoint goes, by which rule, and in words for people."""

    name: str
    size: int
    is_collected: bool
    reason: str
    text: str

    def kept(self, reason: str, text: str) -> Verdict:
        """Return that it stays after all."""
        return self._replace(is_collected=False, reason=reason, text=text)


def family_of(manifest: Manifest) -> str:
    """Return what successive releases of one deployment share: the digest of name and layout."""
    return manifest.key.family(manifest.source.name)


def judge(candidates: Sequence[Candidate], rules: Rules, now: float) -> list[Verdict]:
    """Return a verdict for each candidate, in their order."""
    newest_first = sorted(
        candidates, key=lambda c: (c.made, generation_of(c.name)[1], c.name), reverse=True
    )
    return [
        Verdict(one.name, one.size, *_verdict(one, newest_first, rules, now)) for one in candidates
    ]


def _verdict(
    one: Candidate, newest_first: Sequence[Candidate], rules: Rules, now: float
) -> tuple[bool, str, str]:
    if one.foreign:
        return False, "foreign", one.foreign
    if one.running:
        return False, "running", one.running
    if one.pinned:
        return False, "pinned", "until `shardboot unpin`"
    if now - one.used < rules.grace:
        return False, "young", f"made or served less than {duration(rules.grace)} ago"
    if one.flaw:
        return _on_flawed(one, newest_first)
    return _on_sound(one, [c for c in newest_first if c.family == one.family], rules, now)


def _on_flawed(one: Candidate, newest_first: Sequence[Candidate]) -> tuple[bool, str, str]:
    if one.flaw == DAMAGED:
        return True, DAMAGED, "its files are not what its manifest says"
    same = [c for c in newest_first if c.key == one.key and not c.foreign and c.flaw != DAMAGED]
    if one == same[0] and all(c.flaw for c in same):
        # Boots go by it: without it, they would save the same again.
        return False, "rejected", f"{one.flaw}, and boots know that by it"
    return True, "rejected", one.flaw


def _on_sound(
    one: Candidate, family: Sequence[Candidate], rules: Rules, now: float
) -> tuple[bool, str, str]:
    sound = [c for c in family if not c.flaw and not c.foreign]
    newest = sound[0]
    if one == newest:
        return False, "newest", "the newest of its model and layout"
    if now - newest.made < rules.settle:
        return False, "standby", f"{newest.name} is there for less than {duration(rules.settle)}"
    loaded = next((c for c in sound if c.loaded), None)
    if one == loaded:
        return False, "loaded", f"the newest that vLLM has loaded; {newest.name} is untried"
    if loaded and one.made > loaded.made and one == _first_of(one.maker, loaded.maker, sound):
        return False, "waiting", f"for vLLM {one.maker[0]} nothing newer is there"
    return True, "superseded", f"{newest.name} is newer"


def _first_of(
    maker: tuple[str, int], today: tuple[str, int], sound: Sequence[Candidate]
) -> Candidate:
    """Return the newest for the vLLM of today, or for others: an upgrade's has no rival here."""
    return next(c for c in sound if (c.maker == today) == (maker == today))


def duration(seconds: float) -> str:
    """Return a time for people, in its largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


class Eviction(NamedTuple):
    """Who goes to make room, and how many bytes could be had at most."""

    victims: tuple[Candidate, ...]
    available: int


def choose(candidates: Sequence[Candidate], missing: int, wanted: str | None) -> Eviction:
    """Return whom to evict so that `missing` bytes come free: nobody if all would not be enough.

    What no boot would serve goes first, then the least recently used; nothing that runs, is pinned
    or is the one `wanted`, and nobody whose bytes are not needed.
    """
    able = [
        c
        for c in candidates
        if not (c.running or c.pinned or c.foreign) and c.name != wanted and c.size > 0
    ]
    able.sort(key=lambda c: (not c.flaw, c.used, c.name))
    available = sum(c.size for c in able)
    if available < missing:
        return Eviction((), available)
    victims: list[Candidate] = []
    surplus = -missing
    for each in able:
        if surplus >= 0:
            break
        victims.append(each)
        surplus += each.size
    # A large one at the end may have made small ones before it needless.
    for each in reversed(victims[:]):
        if each.size <= surplus:
            victims.remove(each)
            surplus -= each.size
    return Eviction(tuple(victims), available)
