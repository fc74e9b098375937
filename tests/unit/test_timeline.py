"""What the ledger's lines tell of a boot, in which order, and whatever state they are in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.insight.blame import best_of, blame, lines
from entrypoint.insight.phases import Phase, laid
from entrypoint.insight.timeline import Timeline, timelines
from entrypoint.state.status import Status

AT = 1_000_000.0
"""When the boot became vLLM."""

ATTEMPT = {
    "event": "attempt",
    "boot": "b1",
    "time": AT,
    "action": "reuse",
    "reason": "local.hit",
    "after": [],
    "phases": [{"phase": "deciding", "start": AT - 0.5, "end": AT}],
    "checkpoint": "tiny-a",
    "key": "k1",
    "family": "f1",
    "family_name": "tiny-tp2",
}


def line(event: str, after: float, **more: Any) -> dict[str, Any]:
    return {"event": event, "boot": "b1", "time": AT + after} | more


HIT: list[dict[str, Any]] = [
    ATTEMPT,
    line("loading", 9, imported=AT + 7, processes=[AT - 100, AT - 1, AT + 3, AT + 5]),
    line("loaded", 10, seconds=1.0, bytes=1 << 30),
    line("phase", 12, phase="profile", start=AT + 11),
    line("phase", 12.5, phase="kv-cache", start=AT + 12),
    line("phase", 15, phase="compile", start=AT + 12.5),
    line("serving", 16),
    line("healthy", 16.25),
]


def read(
    entries: list[Any], *, statuses: tuple[Status, ...] = (), lives: bool = False, now: float = AT
) -> list[Timeline]:
    return timelines(entries, statuses, lambda _: lives, now)


def told(entries: list[Any], **more: Any) -> dict[str, float]:
    [found] = read(entries, **more)
    return {phase.label: round(phase.seconds, 3) for phase in found.phases}


def test_a_hits_phases_follow_one_another() -> None:
    assert told(HIT) == {
        "decide": 0.5,
        "imports (server)": 3,
        "imports (engine)": 2,
        "imports (workers)": 2,
        "build": 2,
        "weights": 1,
        "process": 1,
        "profile": 1,
        "KV cache": 0.5,
        "compile": 2.5,
        "server": 1,
        "health": 0.25,
    }
    [found] = read(HIT)
    assert (found.boot, found.tier, found.outcome) == ("b1", "local", "served")
    assert (found.seconds, found.before) == (16.75, 0.5)
    assert [p.name for p in found.phases if found.is_own(p)] == ["decide"]
    [weights] = [phase for phase in found.phases if phase.name == "weights"]
    assert weights.size == 1 << 30


def without(event: str) -> list[dict[str, Any]]:
    return [entry for entry in HIT if entry["event"] != event]


@pytest.mark.parametrize(
    ("entries", "phases"),
    [
        # Nobody but a worker notes anything between exec and serving.
        pytest.param([ATTEMPT, line("serving", 16)], {"decide": 0.5, "vLLM": 16}, id="no notes"),
        # The source is loaded by vLLM's own loader; somebody asked it at last.
        pytest.param(
            [ATTEMPT | {"action": "serve-source"}, line("healthy", 20)],
            {"decide": 0.5, "vLLM": 20},
            id="source",
        ),
        # As one process: a server that imports all, or older notes.
        pytest.param(
            [ATTEMPT, line("loading", 3, imported=AT + 2), line("loaded", 4), line("serving", 5)],
            {"decide": 0.5, "imports": 2, "build": 1, "weights": 1, "vLLM": 1},
            id="one process",
        ),
        pytest.param(
            [ATTEMPT, line("loading", 3), line("loaded", 4), line("serving", 5)],
            {"decide": 0.5, "vLLM": 4, "weights": 1},
            id="older notes",
        ),
        # A tiny model's weights: any other phase so short would be none.
        pytest.param(
            [ATTEMPT, line("loading", 3), line("loaded", 3.002), line("serving", 5)],
            {"decide": 0.5, "vLLM": 4.998, "weights": 0.002},
            id="weights in no time",
        ),
        # It does not fit, and the source is loaded in its place.
        pytest.param(
            [
                *[ATTEMPT, line("loading", 3), line("objection", 4), line("fell-back", 7)],
                *[line("phase", 9, phase="profile", start=AT + 8), line("serving", 10)],
            ],
            {"decide": 0.5, "vLLM": 4, "source": 4, "profile": 1, "server": 1},
            id="fell back",
        ),
        # Who looked the day after says nothing about how long it took.
        pytest.param(
            [ATTEMPT, line("serving", 5), line("healthy", 86_400)],
            {"decide": 0.5, "vLLM": 5},
            id="seen late",
        ),
        # Weights that are loaded anew while it serves are no part of the boot.
        pytest.param(
            [ATTEMPT, line("serving", 5), line("loading", 50), line("loaded", 60)],
            {"decide": 0.5, "vLLM": 5},
            id="loaded anew",
        ),
        # Two replicas.
        pytest.param(
            [
                *[ATTEMPT, line("loading", 1), line("loading", 2)],
                *[line("loaded", 3, bytes=1), line("loaded", 4, bytes=2), line("serving", 5)],
            ],
            {"decide": 0.5, "vLLM": 2, "weights": 3},
            id="replicas",
        ),
        pytest.param([ATTEMPT | {"action": "refuse"}], {"decide": 0.5}, id="refused"),
        # On a GPU most is compiled while the memory is measured, and vLLM says how long that took.
        pytest.param(
            [
                *[ATTEMPT, line("phase", 9, phase="profile", start=AT + 1, compiled=6.0)],
                *[line("phase", 11, phase="compile", start=AT + 9), line("serving", 11)],
            ],
            {"decide": 0.5, "vLLM": 1, "compile": 8, "profile": 2},
            id="compiled",
        ),
        # Steps that are not known by name keep theirs; what others note in future is passed over.
        pytest.param(
            [
                *[ATTEMPT, line("phase", 4, phase="novel", start=AT + 1), line("serving", 4)],
                line("ended", 90, status=0),
            ],
            {"decide": 0.5, "vLLM": 1, "novel": 3},
            id="novel",
        ),
        # Forked by a standby, or by a server that imports for all: what they fork imports nothing.
        pytest.param(
            [
                ATTEMPT,
                line("loading", 3, imported=AT + 1, processes=[AT - 1, AT + 1.5, AT + 2]),
                *[line("loaded", 4), line("serving", 5)],
            ],
            {"decide": 0.5, "imports": 1, "build": 2, "weights": 1, "vLLM": 1},
            id="forked",
        ),
    ],
)
def test_what_is_not_noted_is_named_as_well(entries: list[Any], phases: dict[str, float]) -> None:
    [found] = read(entries)
    merged: dict[str, float] = {}
    for phase in found.phases:
        merged[phase.label] = merged.get(phase.label, 0) + phase.seconds
    assert merged == pytest.approx(phases)


def test_a_boots_own_steps_are_told_with_their_bytes() -> None:
    steps = [
        {"phase": "deciding", "start": AT - 50, "end": AT - 42},
        {"phase": "copying", "start": AT - 42, "end": AT - 12, "bytes": 3000},
        {"phase": "verifying", "start": AT - 12, "end": AT},
    ]
    [found] = read([ATTEMPT | {"phases": steps, "after": ["copy: shared.hit"]}])
    assert [(p.name, p.seconds, p.size) for p in found.phases] == [
        ("decide", 8, 0),
        ("copy", 30, 3000),
        ("verify", 12, 0),
    ]
    assert found.tier == "shared"


def test_older_lines_tell_of_a_step_by_its_end() -> None:
    old = {name: value for name, value in ATTEMPT.items() if name != "phases"}
    assert told([line("save.done", -1, seconds=30.0), old]) == {"save": 30, "decide": 1}


def test_saving_on_the_way_is_told_beside() -> None:
    [found] = read([*HIT, line("tee.done", 40, seconds=25.0)])
    assert found.beside == (Phase("tee", AT + 15, AT + 40),)
    assert found.seconds == 16.75


@pytest.mark.parametrize(
    ("entries", "lives", "outcome"),
    [
        (HIT, False, "served"),
        (without("healthy"), False, "served"),
        (without("serving"), False, "served"),
        ([*HIT, line("fell-back", 10)], False, "fell-back"),
        (HIT[:3], True, "under-way"),
        (HIT[:3], False, "died"),
        ([*HIT[:3], {"event": "stopped", "boot": "b1"}], False, "stopped"),
        ([*HIT[:3], line("ended", 12, status=143, told=True)], False, "stopped"),
        ([*HIT[:3], line("ended", 12, status=137, told=False)], False, "died"),
        ([*HIT, line("ended", 99, status=143, told=True)], False, "served"),
        ([ATTEMPT | {"action": "refuse"}], True, "refused"),
    ],
)
def test_what_a_boot_came_to(entries: list[Any], lives: bool, outcome: str) -> None:
    [found] = read(entries, lives=lives)
    assert found.outcome == outcome


def test_a_boot_under_way_goes_on_until_now() -> None:
    assert told(HIT[:3], lives=True, now=AT + 13)["vLLM"] == 3


STATUS = Status(
    *("b2", "copying"), action="copy", started=AT, since=AT + 2, updated=AT + 5, done=77
)


def test_a_boot_without_a_decision_is_told_by_its_status() -> None:
    [gone] = read([], statuses=(STATUS,))
    assert (gone.boot, gone.tier, gone.outcome) == ("b2", "shared", "died")
    assert gone.phases == (Phase("decide", AT, AT + 2), Phase("copy", AT + 2, AT + 5, size=77))
    [here] = read([], statuses=(STATUS,), lives=True, now=AT + 9)
    assert (here.outcome, here.phases[-1].end) == ("under-way", AT + 9)
    failed = STATUS._replace(phase="failed", reason="config.invalid")
    [refused] = read([], statuses=(failed,))
    assert (refused.outcome, refused.reason) == ("refused", "config.invalid")
    assert refused.phases == (Phase("decide", AT, AT + 2),)


def test_what_the_ledger_tells_goes_before_a_status() -> None:
    [found] = read(HIT, statuses=(STATUS._replace(boot="b1"),))
    assert found.outcome == "served"


def test_boots_come_in_the_order_in_which_they_began() -> None:
    earlier = ATTEMPT | {"boot": "b0", "phases": [], "time": AT - 99}
    assert [each.boot for each in read([*HIT, earlier])] == ["b0", "b1"]


@pytest.mark.parametrize("odd", ["9", None, -1, True, float("nan"), float("inf"), [], {}, 10**400])
@pytest.mark.parametrize("field", ["time", "start", "imported", "processes", "phases", "bytes"])
def test_an_odd_field_is_as_good_as_absent(field: str, odd: object) -> None:
    [odd_one] = read([entry | {field: odd} if field in entry else entry for entry in HIT])
    [absent] = read([{n: v for n, v in entry.items() if n != field} for entry in HIT])
    assert odd_one == absent


OTHERS = ("stopped", "tee.done", "copy.done", "ended")

moments = st.one_of(
    st.floats(AT - 100, AT + 100), st.sampled_from([AT, AT + 1, 0, -1, 1e300, None, "x", True])
)
own_phases = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"phase": st.sampled_from(["deciding", "copying", "?"])},
            optional={"start": moments, "end": moments, "bytes": moments},
        ),
        st.none(),
    ),
    max_size=4,
)
entries = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["attempt", "loading", "loaded", "phase", "serving", "healthy", "fell-back", *OTHERS]
        ),
        "boot": st.sampled_from(["b1", "b2", 3, None]),
    },
    optional={
        "time": moments,
        "start": moments,
        "imported": moments,
        "compiled": moments,
        "seconds": moments,
        "bytes": moments,
        "action": st.sampled_from(["reuse", "refuse", "tee", "serve-source", 7]),
        "processes": st.one_of(st.lists(moments, max_size=5), moments),
        "phases": st.one_of(own_phases, moments),
        "phase": st.sampled_from(["profile", "kv-cache", "compile", "?", 4]),
    },
)


@given(st.lists(entries, max_size=12), st.booleans())
def test_phases_neither_overlap_nor_leave_a_gap(found: list[dict[str, Any]], lives: bool) -> None:
    every = read([*found, ATTEMPT], lives=lives, now=AT + 50)
    assert "b1" in [each.boot for each in every]
    for each in every:
        assert all(phase.seconds > 0 for phase in each.phases)
        assert all(a.end == b.start for a, b in itertools.pairwise(each.phases))
        assert each.seconds == pytest.approx(sum(phase.seconds for phase in each.phases))
        assert each.before >= 0
        json.dumps(each.to_json(), allow_nan=False)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), max_size=8))
def test_laying_moves_no_end(spans: list[tuple[float, float]]) -> None:
    known = [Phase(str(n), min(span), max(span)) for n, span in enumerate(spans)]
    found = laid(known)
    if found:
        assert found[0].start == min(phase.start for phase in known)
        assert found[-1].end == pytest.approx(max(phase.end for phase in known), abs=0.2)
    assert {phase.end for phase in found} <= {edge for span in spans for edge in span}


def other(boot: str, seconds: float, **more: Any) -> Timeline:
    attempt = ATTEMPT | {"boot": boot} | more
    lines = [{"event": "serving", "boot": boot, "time": AT + seconds}]
    [found] = read([attempt, *lines])
    return found


def test_a_boot_is_held_against_the_best_other_one_of_its_key() -> None:
    [this] = read(HIT)
    slow, best = other("b2", 30), other("b3", 12)
    foreign = other("b4", 1, key="k2")
    assert best_of(this, [this, slow, best, foreign]) == best
    assert best_of(this, [this, foreign]) == foreign  # the same model and layout, at least
    assert best_of(this, [this, other("b5", 1, key="k2", family="f2")]) is None
    found = blame(this, [this, best])
    assert [share.label for share in found.shares][:3] == [
        "imports (server)",
        "compile",
        "imports (engine)",
    ]
    [decide] = [share for share in found.shares if share.label == "decide"]
    assert (decide.best, decide.more) == (0.5, 0)
    assert lines(found)[0] == ("b1: 16.8 s, served, 4.2 s more than the best other one, b3")
    assert lines(blame(this, [this]))[0] == (
        "b1: 16.8 s, served; no other boot of its kind has served"
    )


def test_a_boot_that_never_served_is_no_measure() -> None:
    [this] = read(HIT)
    [died] = read([ATTEMPT | {"boot": "b2"}])
    assert best_of(this, [this, died]) is None
