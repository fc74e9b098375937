"""What the ledger and the local store tell of each deployment: figures for `advise`. Pure.

Lines of the ledger may be torn, older, or of another version: what is not there is not known.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.layout import family_name, generation_of
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.insight.advice import Figures, Step
from entrypoint.state.attempts import Entry
from entrypoint.store.retention import family_of

_STEPS: Final[Mapping[Json, Step]] = {"save.done": "save", "copy.done": "copy", "tee.done": "tee"}
_FROM_SOURCE: Final = ("serve-source", "tee")
_SOURCE_LOADED: Final = [("loaded", action) for action in _FROM_SOURCE]

_NO_QUANTITY: Final = 1e15


@dataclass
class _Past:
    """What one family's lines add up to, while they are read."""

    name: str
    boots: int = 0
    times: list[float] = field(default_factory=list)
    releases: dict[str, int] = field(default_factory=dict)
    source: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    step: Step = ""
    paid: float | None = None
    source_bytes: float = 0.0

    def heard(self, entry: Entry, action: Json) -> None:
        """Add one line of a boot that has come to `action`, or to none."""
        event, seconds = entry.get("event"), _number(entry.get("seconds"))
        if event == "attempt" and action in ("reuse", *_FROM_SOURCE):
            self._booted(entry)
        elif seconds and (event == "source-loaded" or (event, action) in _SOURCE_LOADED):
            self.source.append(seconds)
        elif seconds and (event, action) == ("loaded", "reuse"):
            self.load.append(seconds)
        elif event in _STEPS and seconds:
            self.step, self.paid = _STEPS[event], seconds

    def _booted(self, entry: Entry) -> None:
        self.boots += 1
        if time := _number(entry.get("time")):
            self.times.append(time)
        name = entry.get("checkpoint")
        if isinstance(name, str):
            release = generation_of(name)[0]
            if "" in self.releases:
                self.releases[release] = self.releases.pop("")
        else:
            # From the source: taken for the release that came before, else for the first to come.
            release = next(reversed(self.releases), "")
        self.releases[release] = self.releases.get(release, 0) + 1


def figures(
    entries: Iterable[Entry], manifests: Iterable[Manifest], host: str, source_rate: float | None
) -> list[Figures]:
    """Return the figures of every deployment that booted here or has a checkpoint here, by name.

    `host` is this one's name, as manifests have it; `source_rate`, in bytes a second, stands in
    where nobody has timed how the source loads.
    """
    entries, manifests = [*entries], sorted(manifests, key=lambda each: each.created_at)
    families = _families(entries, manifests)
    pasts: dict[str, _Past] = {}
    for manifest in manifests:
        past = pasts.setdefault(family_of(manifest), _Past(_name(manifest)))
        past.source_bytes = _number(manifest.save.get("source_bytes")) or 0.0
        if manifest.save.get("host") == host:
            past.step, past.paid = "save", _number(manifest.save.get("seconds"))
        else:
            past.step = "copy"
    actions = {str(e.get("boot")): e.get("action") for e in entries if e.get("event") == "attempt"}
    for entry in entries:
        boot = str(entry.get("boot"))
        if boot in families:
            family, name = families[boot]
            pasts.setdefault(family, _Past(name)).heard(entry, actions.get(boot))
    found = [_figures(family, past, source_rate) for family, past in pasts.items()]
    return sorted(found, key=lambda each: (each.name, each.family))


def _families(
    entries: Iterable[Entry], manifests: Iterable[Manifest]
) -> dict[str, tuple[str, str]]:
    """Return by boot which family it was of, and its name; older lines tell by their manifest."""
    by_manifest = {m.digest: (family_of(m), _name(m)) for m in manifests}
    found: dict[str, tuple[str, str]] = {}
    for entry in entries:
        boot, family = str(entry.get("boot")), entry.get("family")
        if isinstance(family, str):
            found[boot] = (family, str(entry.get("family_name")))
        elif (manifest := str(entry.get("manifest"))) in by_manifest:
            found.setdefault(boot, by_manifest[manifest])
    return found


def _name(manifest: Manifest) -> str:
    return family_name(manifest.source.name, manifest.key)


def _figures(family: str, past: _Past, source_rate: float | None) -> Figures:
    source = statistics.median(past.source) if past.source else None
    estimate = past.source_bytes / source_rate if source_rate and past.source_bytes else None
    return Figures(
        family=family,
        name=past.name,
        boots=past.boots,
        releases=() if "" in past.releases else tuple(past.releases.values()),
        span=max(past.times, default=0.0) - min(past.times, default=0.0),
        source=estimate if source is None else source,
        at_least=source is None and estimate is not None,
        load=statistics.median(past.load) if past.load else None,
        step=past.step,
        paid=past.paid,
    )


def _number(value: Json) -> float | None:
    """Return a time or size that makes sense, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < _NO_QUANTITY else None
