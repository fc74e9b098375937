"""What stays and what goes, from facts alone."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import make_checkpoint, make_key
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.store.retention import Candidate, Rules, choose, family_of, judge

NOW = 1_000_000.0
DAY = 86_400.0


def old(name: str, days: float = 10, **facts: Any) -> Candidate:
    """Return a checkpoint made some days ago, of one family, with a key of its own."""
    made = NOW - days * DAY
    base = Candidate(name, 100, key=f"key of {name}", family="f", made=made, used=made)
    return base._replace(**facts)


NEW = old("new", days=1)
BEFORE, TODAY, NEXT = ((version, 1) for version in ("0.31", "0.32", "0.33"))


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([NEW], {"new": "newest"}, id="the only one stays"),
        pytest.param([NEW, old("a")], {"a": "superseded"}, id="an older one goes"),
        pytest.param([NEW, old("a", family="g")], {"a": "newest"}, id="each family has a newest"),
        pytest.param([NEW, old("a", pinned=True)], {"a": "pinned"}, id="a pinned one stays"),
        pytest.param([NEW, old("a", running="7")], {"a": "running"}, id="a running one stays"),
        pytest.param([NEW, old("a", used=NOW - 60)], {"a": "young"}, id="served a minute ago"),
        pytest.param(
            [NEW, old("a", days=0.01)], {"new": "superseded", "a": "young"}, id="made just now"
        ),
        pytest.param([NEW, old("a", days=-1)], {"a": "young"}, id="made in the future: stays"),
        pytest.param([NEW, old("a", foreign="odd")], {"a": "foreign"}, id="not ours to touch"),
        pytest.param(
            [NEW, old("a", loaded=True), old("b", days=20, loaded=True)],
            {"new": "newest", "a": "loaded", "b": "superseded"},
            id="until the newest is known to load, the one before stands by",
        ),
        pytest.param(
            [NEW._replace(loaded=True), old("a", loaded=True)],
            {"a": "superseded"},
            id="the newest has loaded",
        ),
        pytest.param(
            [
                NEW._replace(maker=NEXT),
                old("a", days=2, maker=TODAY),
                old("b", days=3, maker=TODAY),
                old("c", days=4, maker=TODAY, loaded=True),
                old("d", days=5, maker=BEFORE),
            ],
            {
                "new": "newest",
                "a": "waiting",
                "b": "superseded",
                "c": "loaded",
                "d": "superseded",
            },
            id="what an upgrade will want does not cost what today's vLLM will",
        ),
        pytest.param(
            [
                NEW._replace(maker=TODAY),
                old("a", days=2, maker=NEXT),
                old("b", days=3, maker=NEXT),
                old("c", days=4, maker=TODAY, loaded=True),
            ],
            {"new": "newest", "a": "waiting", "b": "superseded", "c": "loaded"},
            id="nor the other way round",
        ),
        pytest.param(
            [NEW._replace(flaw="damaged"), old("a"), old("b", days=20)],
            {"new": "damaged", "a": "newest", "b": "superseded"},
            id="a damaged one is no newest",
        ),
        pytest.param(
            [NEW._replace(flaw="quarantined"), old("a")],
            {"new": "rejected", "a": "newest"},
            id="a rejected one is no newest either",
        ),
        pytest.param(
            [old("x", days=20), old("x-g2", days=20)],
            {"x": "superseded", "x-g2": "newest"},
            id="of one second, the later generation is newer",
        ),
    ],
)
def test_the_table(candidates: list[Candidate], expected: dict[str, str]) -> None:
    verdicts = {v.name: v.reason for v in judge(candidates, Rules(grace=3600), NOW)}
    assert {name: verdicts[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("others", "goes"),
    [
        pytest.param([], False, id="boots know by it not to save that again"),
        pytest.param([old("g2", key="k", days=1)], True, id="a sound one of its key is served"),
        pytest.param([old("g2", key="k", flaw="operator", days=1)], True, id="a later one tells"),
        pytest.param([old("g2", key="k", flaw="damaged", days=1)], False, id="damage tells not"),
        pytest.param([old("g2", key="other", days=1)], False, id="another key tells nothing"),
    ],
)
def test_the_last_rejected_one_of_a_key_stays(others: list[Candidate], goes: bool) -> None:
    rejected = old("g1", key="k", flaw="quarantined")
    verdict = judge([rejected, *others], Rules(grace=0), NOW)[0]
    assert (verdict.is_collected, verdict.reason) == (goes, "rejected")


def test_where_others_cannot_be_asked_an_older_one_goes_only_after_a_while() -> None:
    rules = Rules(grace=7 * DAY, settle=7 * DAY)
    reasons = [v.reason for v in judge([NEW, old("a", days=30)], rules, NOW)]
    assert reasons == ["young", "standby"]
    reasons = [v.reason for v in judge([old("b", days=8), old("a", days=30)], rules, NOW)]
    assert reasons == ["newest", "superseded"]


times = st.floats(NOW - 30 * DAY, NOW + DAY)
candidates = st.builds(
    Candidate,
    name=st.text("abc", min_size=1, max_size=8),
    size=st.integers(0, 1000),
    key=st.sampled_from("kl"),
    family=st.sampled_from("fg"),
    made=times,
    used=times,
    loaded=st.booleans(),
    pinned=st.booleans(),
    running=st.sampled_from(["", "", "process 7"]),
    flaw=st.sampled_from(["", "", "damaged", "quarantined", "unfit"]),
    foreign=st.sampled_from(["", "", "", "odd"]),
)
stores = st.lists(candidates, max_size=8, unique_by=lambda c: c.name)


@given(stores, st.floats(0, 20 * DAY), st.sampled_from([0, 5 * DAY]))
def test_what_must_stay_never_goes(store: list[Candidate], grace: float, settle: float) -> None:
    verdicts = judge(store, Rules(grace, settle), NOW)
    assert [v.name for v in verdicts] == [c.name for c in store]
    gone = [c for c, v in zip(store, verdicts, strict=True) if v.is_collected]
    for one in gone:
        assert (one.running, one.pinned, one.foreign) == ("", False, "")
        assert NOW - one.used >= grace
        if not one.flaw:
            sound = [c for c in store if c.family == one.family and not c.flaw and not c.foreign]
            assert any(c.made >= one.made for c in sound if c not in gone)
    for verdict in verdicts:
        assert verdict.reason
        assert verdict.text


@given(stores, st.integers(1, 3000))
def test_an_eviction_is_enough_and_no_more(store: list[Candidate], missing: int) -> None:
    victims, available = choose(store, missing, wanted="a")
    able = [c for c in store if not (c.running or c.pinned or c.foreign or c.name == "a")]
    assert available == sum(c.size for c in able)
    assert set(victims) <= set(able)
    freed = sum(c.size for c in victims)
    if available < missing:
        assert victims == ()
    else:
        assert freed >= missing
        assert all(freed - c.size < missing for c in victims)


def test_an_eviction_takes_the_least_recently_used_and_first_what_nobody_would_serve() -> None:
    store = [
        old("served", used=NOW),
        old("older", days=20),
        old("damaged", days=1, flaw="damaged"),
        old("old"),
    ]
    order = [[c.name for c in choose(store, size, None).victims] for size in (1, 101, 201, 301)]
    assert order == [
        ["damaged"],
        ["damaged", "older"],
        ["damaged", "older", "old"],
        ["damaged", "older", "old", "served"],
    ]


def test_small_ones_stay_where_a_large_one_must_go_anyway() -> None:
    store = [old("small", days=20, size=1), old("large", size=500)]
    assert [c.name for c in choose(store, 400, None).victims] == ["large"]


def manifest(tmp_path: Any, **changes: Any) -> Manifest:
    return make_checkpoint(tmp_path, key=make_key(**changes))


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"vllm": "0.33.0"}, True),
        ({"model": "0" * 64}, True),
        ({"tp": 4}, False),
        ({"dtype": "float16"}, False),
        ({"quantization": "awq"}, False),
        ({"platform": "cuda"}, False),
    ],
    ids=str,
)
def test_a_family_is_a_models_name_and_layout(
    tmp_path: Any, changes: dict[str, Any], same: bool
) -> None:
    one, other = manifest(tmp_path), manifest(tmp_path, **changes)
    assert (family_of(one) == family_of(other)) is same
    renamed = one._replace(source=Source("test/other", None, {}))
    assert family_of(one) != family_of(renamed)
