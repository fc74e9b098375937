"""What the ledger says of earlier boots from a checkpoint. Pure.

A failed attempt noted that it began to load, and never that it had loaded, nor that it was told
to stop; on the same boot of this host, so that a power loss counts against nobody. A port in use,
bad flags, or memory that ran out after loading never count against weights. But of those that a
load proved, which compares no tokens, they count until they have served. Those that never began to
load are counted apart: what may be the checkpoint's fault, and may be the machine's.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

from entrypoint.checkpoint.digest import Json

Entry = Mapping[str, Json]

_END_OF_TIME: Final = 1e11
"""Seconds since 1970 that no clock shows; a torn line may say anything."""

TIERS: Final = {
    "reuse": "local",
    "copy": "shared",
    "save": "saved",
    "tee": "source",
    "serve-source": "source",
}
"""Where the weights come from, by what a boot did last."""


def tier_of(attempt: Entry) -> str:
    """Return where the weights of a boot came from: local, shared, saved or source; else none."""
    action, after = str(attempt.get("action")), attempt.get("after")
    if action == "reuse" and isinstance(after, list) and after:
        action = str(after[-1]).partition(":")[0]
    return TIERS.get(action, "none")


def time_in(entry: Entry, field: str) -> float | None:
    """Return a field that is a time, or a length of time, that makes sense; else None."""
    return a_time(entry.get(field))


def a_time(value: Json) -> float | None:
    """Return a time that makes sense, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < _END_OF_TIME else None


_SERVED: Final = frozenset({"serving", "healthy"})
_SURVIVED: Final = frozenset({"loaded", "healthy", "fell-back"})


class _Attempt:
    def __init__(self, entry: Entry) -> None:
        self.host_boot = str(entry.get("host_boot"))
        self.process = (entry.get("pid"), entry.get("pid_start"))
        self.namespace = entry.get("pid_namespace")
        self.asked = entry.get("asked")
        self.events: set[str] = set()

    def failed(self, survived: frozenset[str]) -> bool:
        return "loading" in self.events and not self.events & (survived | {"stopped"})

    def loaded(self, survived: frozenset[str]) -> bool:
        """Whether what it served came from the checkpoint, and is sound."""
        return bool(self.events & survived) and "fell-back" not in self.events

    def tells(self, survived: frozenset[str]) -> bool:
        """Whether it came so far that it says something of the weights; a stop before does not."""
        return "loading" in self.events and bool(
            self.events & survived or "stopped" not in self.events
        )


def failures_in_row(
    entries: Iterable[Entry],
    manifest: str,
    host_boot: str,
    may_live: Callable[[Json, Json, Json], bool],
) -> int:
    """Return how many of the latest attempts to load this manifest failed, one after another.

    Attempts that never came to loading, or may still be at it, tell nothing and are passed over; a
    success, and an `unrejected`, end the row. None where a server has loaded it, and may still run:
    others that die then do not die of it. `entries` are oldest first; `may_live(pid, start,
    namespace)` is asked only about what would be failures, and what would excuse them.
    """
    attempts = [*_since_unrejected(entries, manifest)]
    known = [attempt.events for attempt in attempts]
    was_proved = any("proved" in events for events in known)
    has_served = any(events & _SERVED and "fell-back" not in events for events in known)
    survived = _SERVED | {"fell-back"} if was_proved and not has_served else _SURVIVED
    count = 0
    for attempt in reversed(attempts):
        if attempt.failed(survived) and attempt.host_boot == host_boot:
            count += not may_live(*attempt.process, attempt.namespace)
        elif attempt.tells(survived):
            break
    here = (each for each in attempts if each.host_boot == host_boot)
    if count and any(a.loaded(survived) and may_live(*a.process, a.namespace) for a in here):
        return 0
    return count


def _since_unrejected(entries: Iterable[Entry], manifest: str) -> Iterable[_Attempt]:
    """Return the attempts on a manifest, oldest first, since it last got another chance."""
    attempts: dict[str, _Attempt] = {}
    for entry in entries:
        event, boot = str(entry.get("event")), str(entry.get("boot"))
        if event == "unrejected" and entry.get("manifest") == manifest:
            attempts.clear()
        elif event == "attempt" and entry.get("manifest") == manifest:
            attempts[boot] = _Attempt(entry)
        elif boot in attempts:
            attempts[boot].events.add(event)
    return attempts.values()


SET_ASIDE: Final = "set-aside"
"""The event that says that a boot passes a checkpoint by, since none came to loading it."""

_CAME_TO_LOADING: Final = _SERVED | _SURVIVED | {"loading"}


def never_loaded(
    entries: Iterable[Entry],
    manifest: str,
    asked: str,
    host_boot: str,
    may_live: Callable[[Json, Json, Json], bool],
) -> int:
    """Return how many of the latest attempts died before they came to loading, one after another.

    Only those on this manifest for which vLLM was `asked` the same count: bad flags are mended by
    other words. None where a boot has passed the checkpoint by since the latest of them, so that
    it and the source take turns: nobody can tell whose fault it is, and whichever comes up stays.
    Those told to stop, or that may still be at it, are passed over; one that came to loading, and
    an `unrejected`, end the row. `entries` and `may_live` as for `failures_in_row`.
    """
    entries = list(entries)
    row = 0
    for attempt in reversed([*_since_unrejected(entries, manifest)]):
        if attempt.asked != asked or attempt.host_boot != host_boot:
            continue
        if attempt.events & _CAME_TO_LOADING:
            break
        if "stopped" not in attempt.events:
            row += not may_live(*attempt.process, attempt.namespace)
    events = [e.get("event") for e in entries if e.get("manifest") == manifest]
    latest = next((e for e in reversed(events) if e in ("attempt", SET_ASIDE)), None)
    return 0 if latest == SET_ASIDE else row


_TEE_ENDED: Final = frozenset({"tee.done", "tee.failed", "serving", "healthy"})


def tees_died(
    entries: Iterable[Entry], family: Json, is_alive: Callable[[Json, Json], bool]
) -> int:
    """Return how many of a family's latest boots that saved on the way died of it, in a row.

    They began to load, and neither served, nor gave the save up, nor were told to stop. Whatever
    boot of the host they were on: it may have fallen with them. Those still at it, and those that
    never came to loading, are passed over. `entries` as for `failures_in_row`.
    """
    attempts: dict[str, _Attempt] = {}
    for entry in entries:
        event, boot = str(entry.get("event")), str(entry.get("boot"))
        if event == "attempt" and entry.get("action") == "tee" and entry.get("family") == family:
            attempts[boot] = _Attempt(entry)
        elif boot in attempts:
            attempts[boot].events.add(event)
    count = 0
    for attempt in reversed(attempts.values()):
        if attempt.events & _TEE_ENDED:
            break
        if "loading" in attempt.events and "stopped" not in attempt.events:
            count += not is_alive(*attempt.process)
    return count


_EXCUSED: Final = frozenset({"stopped", "fell-back"})
CACHES_RENEWED: Final = "caches-renewed"
"""The event that says that a checkpoint's caches were moved away."""


def distrust(
    entries: Iterable[Entry],
    manifest: str,
    host_boot: str,
    is_alive: Callable[[Json, Json], bool],
) -> Literal["", "some", "all"]:
    """Return how much of what vLLM keeps for a checkpoint may be bad, by what boots left of it.

    All, if its latest boot had loaded, which is no fault of the weights then, and died before it
    served, and nobody told it to; but once only, until another one has served. Some, if there was
    none since the host was started: files may be torn. `entries` as for `failures_in_row`.
    """
    attempts: dict[str, _Attempt] = {}
    renewed = False
    for entry in entries:
        event, boot = str(entry.get("event")), str(entry.get("boot"))
        if event == CACHES_RENEWED and entry.get("manifest") == manifest:
            renewed = True
        elif event == "attempt" and entry.get("manifest") == manifest:
            attempts[boot] = _Attempt(entry)
        elif boot in attempts:
            attempts[boot].events.add(event)
            renewed = renewed and event not in _SERVED
    here = [attempt for attempt in attempts.values() if attempt.host_boot == host_boot]
    if not here:
        return "some"
    latest = next((a for a in reversed(here) if "loaded" in a.events), None)
    if latest is None or renewed or latest.events & (_SERVED | _EXCUSED):
        return ""
    return "" if is_alive(*latest.process) else "all"


def has_served(entries: Iterable[Entry], manifest: str) -> bool:
    """Tell whether a boot has served a checkpoint with the caches that it has now."""
    boots: set[str] = set()
    served = False
    for entry in entries:
        event, boot = str(entry.get("event")), str(entry.get("boot"))
        if entry.get("manifest") == manifest and event in ("attempt", CACHES_RENEWED):
            boots.add(boot)
            served = served and event != CACHES_RENEWED
        served = served or (boot in boots and event in _SERVED)
    return served


MAX_DELAY_SECONDS = 60.0


def delay_seconds(failures: int) -> float:
    """Return how long to wait before another attempt: nothing at first, then 2, 4, 8 … seconds."""
    return 0.0 if failures < 1 else min(2.0**failures, MAX_DELAY_SECONDS)


class Use(NamedTuple):
    """What boots have done with one checkpoint.

    `served`: when it last was, in seconds since 1970; 0 for never. `loaded`: whether vLLM said
    that it had loaded it. `processes`: pid and start of each that became vLLM on it, as noted,
    since this host booted.
    """

    served: float = 0.0
    loaded: bool = False
    processes: tuple[tuple[Json, Json], ...] = ()


UNUSED = Use()


def uses(entries: Iterable[Entry], host_boot: str) -> dict[str, Use]:
    """Return what became of each checkpoint that was ever served, by its manifest's digest.

    A boot that fell back has served, and loaded, the source.
    """
    found: dict[str, Use] = {}
    manifests: dict[str, str] = {}
    entries = list(entries)
    fell_back = {str(entry.get("boot")) for entry in entries if entry.get("event") == "fell-back"}
    for entry in entries:
        event, boot, manifest = entry.get("event"), str(entry.get("boot")), entry.get("manifest")
        if event == "attempt" and entry.get("action") == "reuse" and isinstance(manifest, str):
            manifests[boot] = manifest
            use = found.get(manifest, UNUSED)
            served, processes = use.served, use.processes
            if boot not in fell_back:
                served = max(served, time_in(entry, "time") or 0.0)
            if entry.get("host_boot") == host_boot:
                processes += ((entry.get("pid"), entry.get("pid_start")),)
            found[manifest] = use._replace(served=served, processes=processes)
        elif event in ("loaded", "healthy") and boot in manifests and boot not in fell_back:
            manifest = manifests[boot]
            found[manifest] = found[manifest]._replace(loaded=True)
    return found
