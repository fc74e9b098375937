"""What the sidecar decides: from plain values, without a process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from entrypoint.config import Prove
from entrypoint.sidecar.choice import (
    Fetch,
    Mending,
    Past,
    to_fetch,
    to_publish,
    to_repair,
    to_scrub,
)
from entrypoint.sidecar.loop import next_due, rest_after
from entrypoint.sidecar.view import (
    DAMAGED,
    REJECTED,
    UNREADABLE,
    Seen,
)

HOST = "here"


def seen(name: str, created: float = 1.0, **facts: Any) -> Seen:
    """Return a sound checkpoint of one family that boots of this node have served."""
    base = Seen(
        *(name, "complete", ""),
        *(f"content of {name}", f"digest of {name}", f"key of {name}"),
        family="f",
        made_by=("0.32", 2),
        created=created,
        host=HOST,
        ranks=(0, 1),
        world=2,
        served=True,
    )
    return base._replace(**facts)


def wanted(name: str, ranks: tuple[int, ...] = (0, 1)) -> Fetch:
    return Fetch(name, f"content of {name}", ranks)


OLD, NEW = seen("old", 1.0), seen("new", 2.0)
SEALED = OLD._replace(proved=True, sealed=True)


@pytest.mark.parametrize(
    ("local", "shared", "expected"),
    [
        pytest.param([OLD], [OLD, NEW], [wanted("new")], id="a newer one"),
        pytest.param([OLD], [OLD], [], id="the one that is here"),
        pytest.param([NEW], [OLD], [], id="an older one"),
        pytest.param([OLD, NEW], [NEW], [], id="the newer one is here, and never was served"),
        pytest.param([], [NEW], [], id="nothing is served here"),
        pytest.param([OLD._replace(served=False)], [NEW], [], id="what is here was never served"),
        pytest.param([OLD], [NEW._replace(family="g")], [], id="another model or layout"),
        pytest.param([OLD], [NEW._replace(state=REJECTED)], [], id="rejected"),
        pytest.param([OLD], [Seen("odd", UNREADABLE)], [], id="unreadable there"),
        pytest.param([Seen("odd", UNREADABLE)], [NEW], [], id="unreadable here"),
        pytest.param(
            [OLD], [NEW, seen("newest", 3.0)], [wanted("newest")], id="of two, the newest"
        ),
        pytest.param(
            [OLD],
            [NEW, seen("newest", 3.0, state=REJECTED)],
            [wanted("new")],
            id="of two, the newest that may be served",
        ),
        pytest.param(
            [OLD._replace(ranks=(1,))],
            [NEW],
            [wanted("new", (1,))],
            id="for the ranks of this node",
        ),
        pytest.param(
            [OLD, NEW._replace(state=DAMAGED)], [NEW], [], id="damaged here, so it is repaired"
        ),
        pytest.param(
            [OLD, NEW._replace(state=DAMAGED)],
            [NEW, seen("newest", 3.0)],
            [wanted("newest")],
            id="damaged here, and there is a newer one",
        ),
        pytest.param(
            [OLD, NEW._replace(state=UNREADABLE)], [NEW], [], id="here, and could not be read now"
        ),
        pytest.param([OLD, NEW._replace(state=REJECTED)], [NEW], [], id="here, and rejected"),
        pytest.param([OLD], [seen("done", 2.0)], [], id="fetched before, and gone since"),
        pytest.param(
            [OLD._replace(ranks=(1,)), seen("torn", 1.5, state=DAMAGED, ranks=())],
            [NEW],
            [wanted("new", (1,))],
            id="of which ranks one is here is torn: those of the one before",
        ),
        pytest.param([OLD._replace(ranks=())], [NEW], [], id="nobody knows which ranks"),
        pytest.param(
            [OLD], [NEW._replace(made_by=("0.31", 2))], [], id="for a vLLM before those served"
        ),
        pytest.param([OLD], [NEW._replace(made_by=("0.32", 1))], [], id="in a format before"),
        pytest.param(
            [OLD], [NEW._replace(made_by=("built here", 2))], [], id="for nobody knows which"
        ),
        pytest.param(
            [OLD],
            [seen("next", 0.5, made_by=("0.33", 2))],
            [wanted("next")],
            id="for a later vLLM, as an upgrade wants it, whenever it was saved",
        ),
        pytest.param(
            [OLD],
            [NEW, seen("next", 3.0, made_by=("0.40.0", 2)), seen("dev", 4.0, made_by=("0.33", 2))],
            [wanted("next"), wanted("new")],
            id="for the latest vLLM, and for today's",
        ),
        pytest.param(
            [OLD, seen("next", 3.0, made_by=("0.33", 2), served=False)],
            [NEW, seen("next", 3.0, made_by=("0.33", 2))],
            [wanted("new")],
            id="for a later vLLM it is here, and of today's there is a newer one",
        ),
        pytest.param(
            [OLD, seen("next", 3.0, made_by=("0.33", 2), served=False)],
            [seen("again", 4.0, made_by=("0.33", 2)), seen("first", 2.0, made_by=("0.33", 2))],
            [wanted("again")],
            id="for a later vLLM, a newer release",
        ),
        pytest.param(
            [OLD], [NEW._replace(made_by=("0.32", 3))], [wanted("new")], id="a later format"
        ),
        pytest.param(
            [seen("old", made_by=("0.33", 2)), seen("other", family="g")],
            [NEW],
            [wanted("new")],
            id="for a vLLM that has served another model",
        ),
        pytest.param(
            [OLD, seen("other", family="g")],
            [NEW, seen("another", 3.0, family="g")],
            [wanted("another"), wanted("new")],
            id="of each family, the newest first",
        ),
    ],
)
def test_what_is_fetched(local: list[Seen], shared: list[Seen], expected: list[Fetch]) -> None:
    assert to_fetch(local, shared, {"content of done"}, "auto") == expected


@pytest.mark.parametrize(
    ("here", "there", "is_repaired"),
    [
        pytest.param(NEW, NEW, False, id="sound"),
        pytest.param(NEW._replace(state=DAMAGED), NEW, True, id="damaged"),
        pytest.param(NEW._replace(state=DAMAGED, running=True), NEW, True, id="and in use"),
        pytest.param(NEW._replace(state=DAMAGED, served=False), NEW, True, id="never served"),
        pytest.param(
            NEW._replace(state=DAMAGED), NEW._replace(name="new-g2"), True, id="another name there"
        ),
        pytest.param(NEW._replace(state=DAMAGED), OLD, False, id="not there"),
        pytest.param(
            NEW._replace(state=DAMAGED), NEW._replace(state=REJECTED), False, id="rejected"
        ),
        pytest.param(
            NEW._replace(state=DAMAGED, ranks=()), NEW, False, id="nobody knows which ranks"
        ),
        pytest.param(Seen("odd", UNREADABLE), Seen("odd", UNREADABLE), False, id="unreadable"),
        pytest.param(
            *(seen("done", state=DAMAGED), seen("done")), False, id="repaired a moment ago"
        ),
        pytest.param(
            *(seen("long ago", state=DAMAGED), seen("long ago")), True, id="repaired long ago"
        ),
    ],
)
def test_what_is_repaired(here: Seen, there: Seen, is_repaired: bool) -> None:
    past = Past({"content of done": 95.0, "content of long ago": 90.0}, now=100.0, interval=10.0)
    found = to_repair([here], [there], past)
    assert found == [Mending(here.name, here.content, there.name)] * is_repaired


@pytest.mark.parametrize(
    ("served", "new", "prove", "is_fetched"),
    [
        (False, False, "auto", True),
        (True, False, "auto", False),
        (True, True, "auto", True),
        (False, False, "always", False),
        (True, True, "always", True),
        (True, False, "never", True),
    ],
)
def test_what_no_boot_would_serve_unproved_is_fetched_with_a_proof(
    served: bool, new: bool, prove: Prove, is_fetched: bool
) -> None:
    local, shared = [OLD._replace(proved=served)], [NEW._replace(proved=new)]
    assert to_fetch(local, shared, (), prove) == [wanted("new")] * is_fetched


@pytest.mark.parametrize(
    ("local", "shared", "expected"),
    [
        pytest.param([SEALED], [], ["old"], id="proved"),
        pytest.param([OLD._replace(loaded=True)], [], ["old"], id="loaded without a proof"),
        pytest.param([OLD], [], [], id="neither"),
        pytest.param(
            [OLD._replace(proved=True)], [], ["old"], id="proved here, whence it goes along"
        ),
        pytest.param([SEALED], [SEALED], [], id="it is there"),
        pytest.param([OLD._replace(loaded=True)], [OLD], [], id="it is there, and asked for none"),
        pytest.param([OLD._replace(loaded=True)], [SEALED], [], id="and has one there"),
        pytest.param([OLD._replace(proved=True)], [SEALED], [], id="it is there with its proof"),
        pytest.param([OLD._replace(proved=True)], [OLD], ["old"], id="it is there without a proof"),
        pytest.param(
            [OLD._replace(proved=True)],
            # As this node sees it, which keeps a proof of that content.
            [OLD._replace(proved=True)],
            ["old"],
            id="without one that other nodes see",
        ),
        pytest.param(
            [SEALED],
            [NEW._replace(key=OLD.key, proved=True, sealed=True)],
            [],
            id="another save of its key is there",
        ),
        pytest.param(
            [SEALED],
            [NEW._replace(key=OLD.key, proved=True, sealed=True, state=REJECTED)],
            ["old"],
            id="the other save of its key was rejected",
        ),
        pytest.param([SEALED._replace(host="there")], [], [], id="saved elsewhere"),
        pytest.param(
            [SEALED, seen("next", 3.0, host="there", made_by=("0.33", 2))],
            [],
            ["old"],
            id="one for a later vLLM was saved elsewhere",
        ),
        pytest.param([SEALED._replace(ranks=(0,))], [], [], id="some ranks only"),
        pytest.param([SEALED._replace(state=DAMAGED)], [], [], id="damaged"),
        pytest.param([seen("done", proved=True, sealed=True)], [], [], id="published before"),
        pytest.param(
            [SEALED, NEW._replace(proved=True, sealed=True)],
            [],
            ["new"],
            id="the newest",
        ),
        pytest.param(
            [
                SEALED,
                NEW._replace(proved=True, sealed=True, state=DAMAGED),
            ],
            [],
            ["old"],
            id="the newest that is sound",
        ),
    ],
)
def test_what_is_published(local: list[Seen], shared: list[Seen], expected: list[str]) -> None:
    found = to_publish(local, shared, HOST, {"content of done"})
    assert [each.name for each in found] == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, "old"),
        ({"old": 50.0}, "new"),
        ({"old": 50.0, "new": 40.0}, "new"),
        ({"old": 91.0, "new": 95.0}, None),
        ({"old": 90.0, "new": 95.0}, "old"),
    ],
)
def test_who_was_read_longest_ago_is_read_next(
    times: dict[str, float], expected: str | None
) -> None:
    scrubbed = {f"digest of {name}": time for name, time in times.items()}
    found = to_scrub([OLD, NEW, Seen("odd", UNREADABLE)], scrubbed, now=100.0, interval=10.0)
    assert (found and found.name) == expected


def test_what_is_known_to_be_damaged_is_not_read_again() -> None:
    assert to_scrub([OLD._replace(state=DAMAGED)], {}, now=100.0, interval=0.0) is None


def test_the_first_of_those_that_are_due_has_its_turn() -> None:
    assert next_due({"a": 2.0, "b": 1.0, "c": 1.0, "never": math.inf}) == "b"


def test_failures_are_waited_for_ever_longer_up_to_a_bound() -> None:
    rests = [rest_after(60, n, 0.0) for n in (1, 2, 3, 10, 11, 100_000)]
    assert rests == [62, 64, 68, 1084, 1084, 1084]


def test_hosts_that_failed_together_do_not_come_back_together() -> None:
    assert [rest_after(60, 3, chance) for chance in (0.0, 0.5, 1.0)] == [68, 66, 64]
