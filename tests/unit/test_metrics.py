"""What Prometheus is told: by its conventions, and so that its own parser reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import entrypoint
from entrypoint.checkpoint.digest import Json
from entrypoint.sidecar.history import Told, booted, counted, timed
from entrypoint.sidecar.loop import Job
from entrypoint.sidecar.metrics import Metrics, Sight
from entrypoint.sidecar.view import Seen, StoreView

ODD = 'a "name"\\ of\ntwo lines'
ENTRIES: list[dict[str, Json]] = [
    {
        "boot": "b1",
        "event": "attempt",
        "time": 105.0,
        "action": "reuse",
        "reason": "local.hit",
        "after": ["copy: shared.hit"],
        "family_name": ODD,
        "phases": [
            {"phase": "deciding", "start": 100.0, "end": 101.0},
            {"phase": "copying", "start": 101.0, "end": 104.5},
            {"phase": "deciding", "start": 104.5, "end": 105.0},
        ],
    },
    {"boot": "b1", "event": "loading", "time": 108.0},
    {"boot": "b1", "event": "loaded", "time": 110.0, "seconds": 2.0},
    {"boot": "b2", "event": "attempt", "time": 5.0, "action": "refuse", "reason": "space.short"},
]
SEEN = Seen("n", "complete", content="c", bytes=7)


def families(sight: Sight) -> dict[str, Metric]:
    metrics = Metrics()
    metrics.watch(lambda: sight, [Job("look", 60, lambda: ())])
    return {family.name: family for family in text_string_to_metric_families(metrics.text())}


@pytest.fixture
def told() -> dict[str, Metric]:
    boots = booted(ENTRIES)
    return families(
        Sight(
            {"local": StoreView("/local", (SEEN,)), "shared": StoreView("/shared", error="away")},
            Told({}, *counted(boots), [*timed(boots, ENTRIES)]),
            scrubbed=3.0,
            waiting=2,
            lagging=4.0,
            free=5,
        )
    )


def samples(family: Metric) -> dict[tuple[str, ...], float]:
    """Return them by their labels' values, in the order of the labels' names."""
    return {tuple(s.labels[name] for name in sorted(s.labels)): s.value for s in family.samples}


def test_names_and_units_are_as_prometheus_wants_them(told: dict[str, Metric]) -> None:
    ours = {name: family for name, family in told.items() if name.startswith("shardboot")}
    for name, family in ours.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name), name
        assert family.documentation, name
        assert not family.documentation.endswith("."), name
        # promtool's: a suffix says what kind it is, and units are base units.
        is_counter = family.type == "counter"
        assert all(s.name.endswith("_total") == is_counter for s in family.samples), name
        assert not re.search(r"_(count|sum|bucket|milliseconds|ms|kilobytes|mb|minutes)$", name)
        for sample in family.samples:
            assert not set(sample.labels) & {"le", "quantile", "instance"}, name
    assert {n for n in told if not n.startswith("shardboot")} <= {n for n in told if "process" in n}


def test_boots_are_told_with_what_they_took_the_time_for(told: dict[str, Metric]) -> None:
    (info, _) = sorted(told["shardboot_boot_info"].samples, key=lambda s: s.labels["boot"])
    assert info.labels == {
        "boot": "b1",
        "model": ODD,
        "tier": "shared",
        "outcome": "loaded",
        "reason": "local.hit",
    }
    took = samples(told["shardboot_boot_phase_seconds"])
    assert took["b1", "copy"] == 3.5
    assert took["b1", "decide"] == 1.5
    assert took["b1", "weights"] == 2.0
    assert samples(told["shardboot_refusals"]) == {("space.short",): 1}
    assert samples(told["shardboot_boots"]) == {("loaded", "shared"): 1, ("refused", "none"): 1}


def test_what_an_alarm_goes_by_is_there(told: dict[str, Metric]) -> None:
    assert samples(told["shardboot_store_up"]) == {("local",): 1, ("shared",): 0}
    assert samples(told["shardboot_checkpoint_bytes"]) == {("local",): 7}
    assert samples(told["shardboot_checkpoints"])["complete", "local"] == 1
    assert samples(told["shardboot_local_free_bytes"]) == {(): 5}
    assert samples(told["shardboot_scrub_oldest_timestamp_seconds"]) == {(): 3}
    assert samples(told["shardboot_prefetch_waiting"]) == {(): 2}
    assert samples(told["shardboot_prefetch_lag_seconds"])[()] > 1e9


def test_nothing_waits_where_nothing_is_newer() -> None:
    assert samples(families(Sight())["shardboot_prefetch_lag_seconds"]) == {(): 0}


def test_the_docs_name_none_that_is_not_there(told: dict[str, Metric]) -> None:
    text = (Path(entrypoint.__file__).parents[1] / "docs/sidecar.md").read_text()
    named = set(re.findall(r"\b(shardboot_[a-z_]+)", text))
    assert named
    assert {name.removesuffix("_total") for name in named} <= told.keys()
