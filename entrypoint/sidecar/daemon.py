"""The sidecar as a whole: who does what how often, and what others may read of it."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn, Protocol

from entrypoint import __version__
from entrypoint.checkpoint.digest import Json
from entrypoint.config import Settings
from entrypoint.log import stderr_log
from entrypoint.obstacles import unwritable
from entrypoint.sidecar import loop
from entrypoint.sidecar.bearer import token_in
from entrypoint.sidecar.collect import collect
from entrypoint.sidecar.later import Later
from entrypoint.sidecar.listener import Listener, Page, Pages, Wishes
from entrypoint.sidecar.loop import Job
from entrypoint.sidecar.node import Node
from entrypoint.sidecar.page import page
from entrypoint.sidecar.prefetch import Prefetch
from entrypoint.sidecar.priority import stand_back
from entrypoint.sidecar.prove import Prove
from entrypoint.sidecar.publish import Publish
from entrypoint.sidecar.repair import Repair
from entrypoint.sidecar.scrub import Scrub
from entrypoint.store.directory import DirectoryStore

METRICS = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
HTML = "text/html; charset=utf-8"

RETRY_AFTER = "10"
"""Seconds in which most jobs are done."""

_LOOKS = ("look", "look-far")


def run(settings: Settings, environ: Mapping[str, str]) -> NoReturn:
    """Look after this node until a signal ends it.

    Raises: ConfigError for a store that is none, or a port that is taken.
    """
    stand_back()
    log = stderr_log("sidecar", settings.log_format, is_daemon=True)
    node = Node(settings, environ, log)
    hint = threading.Event()
    every = jobs_of(node, hint)
    node.metrics.watch(lambda: node.sight, every)
    wishes = Wishes(wishes_of(every, hint), token_in(settings.token_file))
    listener = Listener(
        settings.listen, pages_of(node, every), wishes, lambda text: log.line("page.failed", text)
    )
    listener.start()
    names = ", ".join(job.name for job in every)
    log.line("sidecar.listening", f"http://{listener.place}; jobs: {names}")
    obstacle = unwritable(settings)
    if obstacle is not None and os.path.isdir(settings.local_dir):
        log.line(obstacle.reason, f"{obstacle.text}; only looking")
    node.before_looking_far = watch_of(node, hint)
    loop.run(every, lambda text: log.line("job.failed", text), hint)


def watch_of(node: Node, hint: threading.Event) -> Callable[[], None]:
    """Return what has the shared store watched, as far as that can be; to be called again."""
    store = node.shared
    if not isinstance(store, DirectoryStore):
        return lambda: None
    if find_spec("watchdog") is None:
        how = f"{sys.executable} -m pip install watchdog"
        node.log.line("watch", f"{store.where}: only looks tell of news: no watchdog here; {how}")
        return lambda: None
    # An extra, which a sidecar can do without.
    from entrypoint.sidecar.watch import Watch  # noqa: PLC0415

    return Watch(store.root, hint, lambda text: node.log.line("watch", text)).renew


class _OfMany(Protocol):
    """A job on one checkpoint after the other, some of which may be put off."""

    later: Later

    def run(self) -> Iterator[float]: ...


def _job(name: str, interval: float, work: _OfMany, *, is_hinted: bool = False) -> Job:
    forget = work.later.forget_all
    return Job(name, interval, work.run, is_hinted=is_hinted, when_asked=forget)


def jobs_of(node: Node, hint: threading.Event) -> list[Job]:
    """Return what is done on this node, those first that the others go by.

    Who finds damage sets `hint`.
    """
    settings = node.settings
    often, collecting = settings.watch_interval, settings.collect_interval
    found = [Job("look", often, node.look)]
    if node.shared is not None:
        found.append(Job("look-far", often, node.look_far, is_hinted=True))
        found.append(_job("repair", often, Repair(node), is_hinted=True))
        if settings.follow:
            found.append(_job("prefetch", often, Prefetch(node), is_hinted=True))
        if settings.publish:
            found.append(_job("publish", often, Publish(node)))
    if settings.scrub_interval < math.inf:
        scrub = Scrub(node, hint.set)
        found.append(Job("scrub", often, scrub.run, when_asked=scrub.ask))
    if settings.prove_idle != "no" and settings.prove != "never":
        prove = Prove(node)
        found.append(Job("prove", often, prove.run, when_asked=prove.ask))
    if collecting < math.inf:
        found.append(Job("collect", collecting, lambda: collect(node)))
    return found


def pages_of(node: Node, every: Sequence[Job]) -> Pages:
    """Return what is answered under which path."""
    first = every[0]

    def readyz() -> Page:
        record = first.record
        if record.succeeded and not record.error:
            return Page("ready\n")
        return Page(f"not ready: {record.error or 'the first look is under way'}\n", status=503)

    def home() -> Page:
        return Page(page(os.uname().nodename, node.sight, every, time.time()), kind=HTML)

    pages: dict[str, Callable[[], Page]] = {
        "/": home,
        "/healthz": lambda: Page("ok\n"),
        "/readyz": readyz,
        "/metrics": lambda: Page(node.metrics.text(), kind=METRICS),
        "/status": lambda: Page(json.dumps(status_of(node, every), indent=2) + "\n", kind=JSON),
    }
    return pages


def wishes_of(every: Sequence[Job], hint: threading.Event) -> Pages:
    """Return what asks for each job that changes something; it is done as soon as may be."""
    return {f"/{job.name}": _asking(job, hint) for job in every if job.name not in _LOOKS}


def _asking(job: Job, hint: threading.Event) -> Callable[[], Page]:
    def ask() -> Page:
        if not job.ask():
            again = (("Retry-After", RETRY_AFTER),)
            return Page(f"{job.name}: it is under way, or asked for\n", 429, headers=again)
        hint.set()
        return Page(f"{job.name}: it is done as soon as may be\n", 202)

    return ask


def status_of(node: Node, every: Sequence[Job]) -> Json:
    """Return what `shardboot status` and `list` say, as it was seen last, and how the jobs do."""
    sight = node.sight
    boots: list[Json] = [report.to_json() for report in sight.boots]
    stores: dict[str, Json] = {name: view.to_json() for name, view in sight.stores.items()}
    records: dict[str, Json] = {job.name: job.record._asdict() for job in every}
    return {"version": __version__, "boots": boots, "stores": stores, "jobs": records}
