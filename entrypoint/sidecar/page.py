"""The status page: what was seen last, as HTML for a browser, a phone's as well. Pure.

No script, and nothing to load beside it: whoever wants it anew asks for it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from entrypoint import __version__
from entrypoint.health.check import Report
from entrypoint.log import human_bytes
from entrypoint.sidecar import waterfall
from entrypoint.sidecar.compare import Row, rows
from entrypoint.sidecar.history import Booted
from entrypoint.sidecar.loop import Job
from entrypoint.sidecar.markup import Markup, element
from entrypoint.sidecar.metrics import Sight
from entrypoint.sidecar.remedies import remedy
from entrypoint.sidecar.view import COMPLETE, Seen, StoreView
from entrypoint.state.status import Status

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #767676; --good: #23823b; --bad: #c8372d }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
h1 { font-size: 1.4rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem }
p { margin: .4rem 0 }
small, .soft, th { color: var(--soft); font-size: .85rem; font-weight: 400 }
small { display: block }
.good { color: var(--good) }
.bad { color: var(--bad) }
progress { display: block; width: 100% }
ul { padding-left: 1.2rem; margin: .4rem 0 }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0;
  border-bottom: 1px solid var(--line) }
td:not(:first-child):not(:last-child), th { overflow-wrap: normal }
@media (max-width: 44rem) {
  thead { display: none }
  tr, td { display: block }
  tr { border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .7rem; margin: .5rem 0 }
  td { border: 0; padding: .1rem 0 }
  td:not(:first-child)::before { content: attr(data-label) ": "; color: var(--soft) }
  td:empty { display: none }
}
"""

_GONE_WRONG: Final = ("failed", "unhealthy")
_BUSY: Final = ("copying", "saving", "publishing")


def page(host: str, sight: Sight, jobs: Sequence[Job], now: float) -> str:
    """Return the page; `now` is in seconds since 1970."""
    title = f"shardboot on {host}"
    looked = max((job.record.succeeded for job in jobs if job.name == "look"), default=0.0)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE + waterfall.STYLE)),
    )
    body = element(
        "body",
        element("h1", title),
        element(
            "small", f"version {__version__} · {_moment(now)} · last look: {_ago(looked, now)}"
        ),
        *_section("Needs a look", _worries(sight.stores, jobs)),
        *_section("Servers", map(_server, sight.boots), "No boot has left a status here."),
        *_section("Checkpoints", _checkpoints(sight), "No store was seen."),
        *_section("Latest boots", _boots(sight.told.latest, now), "No boot is known of."),
        *_section("Where their time went", _waterfalls(sight.told.latest, now)),
        *_section("Boots without a checkpoint", _refusals(sight.told.refusals), "None."),
        *_section("Jobs", _jobs(jobs, now)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, parts: Iterable[Markup], otherwise: str = "") -> Iterator[Markup]:
    """Yield a heading and what comes under it; nothing at all where there is nothing to say."""
    inner = [*parts]
    if not inner and otherwise:
        inner = [element("p", otherwise, class_="soft")]
    if inner:
        yield element("section", element("h2", title), *inner)


def _worries(stores: Mapping[str, StoreView], jobs: Sequence[Job]) -> Iterator[Markup]:
    said = [f"{name} store: {view.error}" for name, view in stores.items() if view.error]
    for name, view in stores.items():
        wrong = (each for each in view.seen if each.state != COMPLETE)
        said += [f"{name} store: {each.name} is {each.state}: {each.text}" for each in wrong]
    said += [f"job {job.name}: {job.record.error}" for job in jobs if job.record.error]
    if said:
        yield element("ul", *(element("li", text, class_="bad") for text in said))


def _server(report: Report) -> Markup:
    status, standing = report.status or Status(), report.standing
    tone = "good" if standing.is_healthy else ""
    parts = [
        element("strong", standing.phase, class_="bad" if standing.phase in _GONE_WRONG else tone),
        f" {standing.text}",
    ]
    if status.total and standing.phase in _BUSY:
        parts.append(element("progress", value=f"{status.done}", max=f"{status.total}"))
    tier = status.tier and f"tier {status.tier}"
    facts = (status.checkpoint, status.ranks, tier, status.reason, f"boot {status.boot}")
    parts.append(element("small", " · ".join(filter(None, facts))))
    return element("p", *parts)


def _checkpoints(sight: Sight) -> Iterator[Markup]:
    places = {"local": "here", "shared": "shared"}
    where = [f"{places[name]}: {view.where}" for name, view in sight.stores.items()]
    if where and sight.free is not None:
        where.append(f"{human_bytes(sight.free)} free here")
    if where:
        yield element("small", " · ".join(where))
    seen = {name: sight.stores[name].seen if name in sight.stores else () for name in places}
    found = rows(seen["local"], seen["shared"])
    heads = ("checkpoint", "here", "shared", "size", "saved", "compared with what runs")
    yield from _table(heads, map(_checkpoint, found))


def _checkpoint(row: Row) -> Sequence[str]:
    one = row.one
    size = human_bytes(one.bytes) if one.bytes else ""
    saved = _moment(one.created) if one.created else one.created_at
    return one.name, _state(row.here), _state(row.there), size, saved, row.differs


def _state(seen: Seen | None) -> str:
    if seen is None:
        return "no"
    said = [seen.state]
    if len(seen.ranks) != seen.world:
        said.append(f"{len(seen.ranks)} of {seen.world} ranks")
    said += [word for word, is_so in (("in use", seen.running), ("pinned", seen.pinned)) if is_so]
    text = ", ".join(said)
    return text if seen.state == COMPLETE else element("span", text, class_="bad")


def _boots(latest: Sequence[Booted], now: float) -> Iterator[Markup]:
    heads = ("model", "when", "weights from", "came to", "reason")
    cells = (
        (boot.of or boot.boot, _ago(boot.time, now), boot.tier, boot.outcome, boot.reason)
        for boot in latest
    )
    yield from _table(heads, cells)


def _waterfalls(latest: Sequence[Booted], now: float) -> Iterator[Markup]:
    yield from waterfall.waterfalls(
        (f"{boot.of or boot.boot} · {_ago(boot.time, now)}", boot.timeline)
        for boot in latest
        if boot.timeline and boot.timeline.phases
    )


def _refusals(refusals: Mapping[str, int]) -> Iterator[Markup]:
    often = sorted(refusals.items(), key=lambda pair: (-pair[1], pair[0]))
    cells = ((reason, f"{count}", remedy(reason)) for reason, count in often)
    yield from _table(("reason", "boots", "what to do"), cells)


def _jobs(jobs: Sequence[Job], now: float) -> Iterator[Markup]:
    cells = (
        (
            job.name,
            "under way" if job.record.began else "",
            _ago(job.record.succeeded, now),
            f"{job.record.failures} of {job.record.runs}" if job.record.failures else "",
        )
        for job in jobs
    )
    yield from _table(("job", "now", "last went well", "failed"), cells)


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[Markup]:
    """Yield a table; nothing where it would have no line. A phone shows each line as a card."""
    body = [
        element("tr", *(element("td", c, data_label=h) for h, c in zip(heads, cells, strict=True)))
        for cells in lines
    ]
    if body:
        head = element("thead", element("tr", *(element("th", each) for each in heads)))
        yield element("table", head, element("tbody", *body))


def _moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def _ago(moment: float, now: float) -> str:
    """Say how long ago something was; nobody was there for what never was."""
    if not moment:
        return "never"
    seconds = max(0.0, now - moment)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
