"""What Prometheus is told: counters of what was done, and what the last look has seen."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from entrypoint import __version__
from entrypoint.health.check import Report
from entrypoint.sidecar.history import NOTHING, Told
from entrypoint.sidecar.loop import Job
from entrypoint.sidecar.view import STATES, StoreView


class Sight(NamedTuple):
    """All that was seen last. Replaced as a whole: other threads read it.

    `scrubbed`: when the checkpoint was read that was read longest ago, in seconds since 1970, 0
    where one never was, None where there is none. `waiting`: how many are newer in the shared
    store, and `lagging` since when one of them waits, 0 for none. `unproved`: how many wait for a
    proof. `free`: bytes on the disk of the local store, None where they are not known.
    """

    stores: dict[str, StoreView] = {}  # noqa: RUF012 - never changed, only replaced
    told: Told = NOTHING
    boots: tuple[Report, ...] = ()
    scrubbed: float | None = None
    waiting: int = 0
    lagging: float = 0.0
    unproved: int = 0
    free: int | None = None


class Metrics:
    """Everything under `/metrics`; the jobs count into its counters."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        Info("shardboot", "The version of shardboot", registry=self.registry).info(
            {"version": __version__}
        )
        self.prefetched = self._counter("prefetched_checkpoints", "Checkpoints prefetched")
        self.prefetched_bytes = self._counter("prefetched_bytes", "Bytes of these")
        self.repaired = self._counter("repaired_checkpoints", "Damaged checkpoints repaired")
        self.repaired_bytes = self._counter("repaired_bytes", "Bytes copied for that")
        self.proved = self._counter("proved_checkpoints", "Checkpoints proved")
        self.unproven = self._counter("unproven_checkpoints", "Checkpoints that failed their proof")
        self.published = self._counter("published_checkpoints", "Checkpoints published")
        self.published_bytes = self._counter("published_bytes", "Bytes of these")
        self.collected = self._counter("collected_checkpoints", "Checkpoints collected")
        self.collected_bytes = self._counter("collected_bytes", "Bytes of these, and of caches")
        self.scrubbed_bytes = self._counter("scrubbed_bytes", "Bytes read by scrubs")
        self.damaged = self._counter("scrub_damaged_checkpoints", "Checkpoints found damaged")
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"shardboot_{name}", text, registry=self.registry)

    def watch(self, sight: Callable[[], Sight], jobs: Sequence[Job]) -> None:
        """Tell from now on what is in sight, and how the jobs do."""
        self.registry.register(_Seen(sight, jobs))

    def text(self) -> str:
        """Return the page."""
        return generate_latest(self.registry).decode()


class _Seen(Collector):
    def __init__(self, sight: Callable[[], Sight], jobs: Sequence[Job]) -> None:
        self._sight, self._jobs = sight, jobs

    def collect(self) -> Iterator[Metric]:
        sight = self._sight()
        yield from _of_stores(sight)
        yield from _of_boots(sight.told)
        yield from _of_jobs(self._jobs)
        yield _gauge("prefetch_waiting", "Newer checkpoints that are not here yet", sight.waiting)
        lag = time.time() - sight.lagging if sight.lagging else 0.0
        yield _gauge(
            "prefetch_lag_seconds", "How long one of these has been waiting", max(0.0, lag)
        )
        yield _gauge("prove_waiting", "Checkpoints that may need a proof", sight.unproved)
        if sight.scrubbed is not None:
            text = "When the local checkpoint was read whose last scrub is longest ago; 0 for never"
            yield _gauge("scrub_oldest_timestamp_seconds", text, sight.scrubbed)
        if sight.free is not None:
            text = "Bytes free on the disk of the local store"
            yield _gauge("local_free_bytes", text, sight.free)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"shardboot_{name}", text, value=value)


def _of_stores(sight: Sight) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "shardboot_store_up", "Whether the last look at a store succeeded", labels=["store"]
    )
    number = GaugeMetricFamily(
        "shardboot_checkpoints", "Checkpoints, by what is known of them", labels=["store", "state"]
    )
    size = GaugeMetricFamily(
        "shardboot_checkpoint_bytes", "Bytes of all checkpoints", labels=["store"]
    )
    for store, view in sight.stores.items():
        up.add_metric([store], not view.error)
        if view.error:
            # What was there before may have gone.
            continue
        states = Count(each.state for each in view.seen)
        for state in STATES:
            number.add_metric([store, state], states[state])
        size.add_metric([store], sum(each.bytes for each in view.seen))
    yield from (up, number, size)


def _of_boots(told: Told) -> Iterator[Metric]:
    boots = GaugeMetricFamily(
        "shardboot_boots",
        "Boots that the ledger tells of, by where the weights came from, and how far they came",
        labels=["tier", "outcome"],
    )
    for labels, count in told.boots.items():
        boots.add_metric([*labels], count)
    refusals = GaugeMetricFamily(
        "shardboot_refusals", "Of these, those that got no checkpoint", labels=["reason"]
    )
    for reason, count in told.refusals.items():
        refusals.add_metric([reason], count)
    latest = InfoMetricFamily(
        "shardboot_boot", "Each of the latest boots, and what became of it", labels=["boot"]
    )
    phases = GaugeMetricFamily(
        "shardboot_boot_phase_seconds", "What these took the time for", labels=["boot", "phase"]
    )
    for boot in told.latest:
        facts = {"model": boot.of, "tier": boot.tier, "outcome": boot.outcome}
        latest.add_metric([boot.boot], facts | {"reason": boot.reason})
        for phase, seconds in boot.spent.items():
            phases.add_metric([boot.boot, phase], seconds)
    yield from (boots, refusals, latest, phases)


def _of_jobs(jobs: Sequence[Job]) -> Iterator[Metric]:
    runs = CounterMetricFamily("shardboot_job_runs", "Runs begun", labels=["job"])
    failures = CounterMetricFamily("shardboot_job_failures", "Runs that failed", labels=["job"])
    succeeded = GaugeMetricFamily(
        "shardboot_job_last_success_timestamp_seconds",
        "When a run last went well; 0 for never",
        labels=["job"],
    )
    for job in jobs:
        record = job.record
        runs.add_metric([job.name], record.runs)
        failures.add_metric([job.name], record.failures)
        succeeded.add_metric([job.name], record.succeeded)
    yield from (runs, failures, succeeded)
