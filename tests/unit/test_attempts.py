"""Which earlier boots count against a checkpoint."""

from __future__ import annotations

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.state.attempts import (
    MAX_DELAY_SECONDS,
    SET_ASIDE,
    UNUSED,
    Use,
    delay_seconds,
    distrust,
    failures_in_row,
    has_served,
    never_loaded,
    tees_died,
    uses,
)

FAILED = ("loading",)
SERVED = ("loading", "loaded")
STOPPED = ("loading", "stopped")
NEVER_LOADED = ()
SERVING = ("loading", "loaded", "serving")
PROVED = ("loading", "proved", "loaded")
TOLD = ("loading", "loaded", "stopped")
FELL_BACK = ("loading", "fell-back", "loaded")
RENEWED: dict[str, Json] = {"boot": "b", "event": "caches-renewed", "manifest": "m"}


def ledger(*boots: tuple[str, ...], host_boot: str = "h1") -> list[dict[str, Json]]:
    entries: list[dict[str, Json]] = []
    for number, events in enumerate(boots):
        about: dict[str, Json] = {"boot": f"b{number}"}
        entries.append(about | {"event": "attempt", "manifest": "m", "host_boot": host_boot})
        entries += [about | {"event": event} for event in events]
    return entries


def dead(*_: Json) -> bool:
    return False


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        pytest.param((), 0, id="no boot yet"),
        pytest.param((FAILED,), 1, id="one failure"),
        pytest.param((FAILED, FAILED, FAILED), 3, id="three in a row"),
        pytest.param((FAILED, SERVED, FAILED), 1, id="a success ends the row"),
        pytest.param((SERVED, SERVED), 0, id="successes"),
        pytest.param((STOPPED,) * 5, 0, id="rollouts aborted by SIGTERM"),
        pytest.param((FAILED, STOPPED, FAILED), 2, id="a stop neither counts nor ends the row"),
        pytest.param((FAILED, (*SERVED, "stopped"), FAILED), 1, id="a success that was stopped"),
        pytest.param((FAILED, NEVER_LOADED, FAILED), 2, id="a port in use neither counts nor ends"),
        pytest.param((NEVER_LOADED,) * 5, 0, id="bad flags never count against weights"),
        pytest.param((PROVED, SERVED, SERVED), 3, id="proved by a load, and never served"),
        pytest.param((PROVED, SERVING, SERVED), 0, id="proved by a load, and has served"),
        pytest.param((PROVED, (*PROVED, "stopped")), 1, id="proved by a load, and stopped"),
    ],
)
def test_a_failure_is_loading_noted_and_neither_loaded_nor_stopped(
    boots: tuple[tuple[str, ...], ...], expected: int
) -> None:
    assert failures_in_row(ledger(*boots), "m", "h1", dead) == expected


def test_other_checkpoints_and_other_boots_of_the_host_do_not_count() -> None:
    entries = ledger(FAILED, FAILED, FAILED)
    assert failures_in_row(entries, "another", "h1", dead) == 0
    assert failures_in_row(entries, "m", "h2", dead) == 0


def test_taking_a_rejection_back_starts_the_count_anew() -> None:
    entries = ledger(FAILED, FAILED, FAILED)
    entries.append({"event": "unrejected", "manifest": "m"})
    assert failures_in_row(entries, "m", "h1", dead) == 0


def test_foreign_lines_are_no_harm() -> None:
    odd: list[dict[str, Json]] = [{}, {"event": None}, {"boot": 3, "event": ["x"]}]
    assert failures_in_row(odd + ledger(FAILED) + odd, "m", "h1", dead) == 1


PASSED_BY: dict[str, Json] = {"boot": "s", "event": SET_ASIDE, "manifest": "m"}


def asked(*boots: tuple[str, ...], what: str = "q") -> list[dict[str, Json]]:
    return [
        entry | {"asked": what} if entry["event"] == "attempt" else entry
        for entry in ledger(*boots)
    ]


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        pytest.param((), 0, id="no boot yet"),
        pytest.param((NEVER_LOADED,) * 3, 3, id="three in a row"),
        pytest.param((NEVER_LOADED, FAILED, NEVER_LOADED), 1, id="one came to loading"),
        pytest.param((NEVER_LOADED, SERVING), 0, id="one served"),
        pytest.param((NEVER_LOADED, ("healthy",)), 0, id="one was seen to be healthy"),
        pytest.param((NEVER_LOADED, ("fell-back",)), 0, id="one fell back"),
        pytest.param((NEVER_LOADED, ("stopped",), NEVER_LOADED), 2, id="a stop tells nothing"),
    ],
)
def test_boots_that_never_came_to_loading_are_counted_apart(
    boots: tuple[tuple[str, ...], ...], expected: int
) -> None:
    assert never_loaded(asked(*boots), "m", "q", "h1", dead) == expected
    assert never_loaded(asked(*boots), "another", "q", "h1", dead) == 0
    assert never_loaded(asked(*boots), "m", "other words", "h1", dead) == 0
    assert never_loaded(asked(*boots), "m", "q", "another boot of the host", dead) == 0
    assert never_loaded(asked(*boots), "m", "q", "h1", lambda *_: True) == 0


def test_after_a_boot_has_passed_a_checkpoint_by_it_is_tried_once_before_the_next_does() -> None:
    died = asked(*(NEVER_LOADED,) * 4)
    assert never_loaded([*died[:3], PASSED_BY], "m", "q", "h1", dead) == 0
    assert never_loaded([*died[:3], PASSED_BY | {"manifest": "n"}], "m", "q", "h1", dead) == 3
    assert never_loaded([*died[:3], PASSED_BY, died[3]], "m", "q", "h1", dead) == 4
    again: list[dict[str, Json]] = [*died[:3], PASSED_BY, died[3], PASSED_BY]
    assert never_loaded(again, "m", "q", "h1", dead) == 0


def test_another_chance_forgets_boots_that_never_came_to_loading() -> None:
    entries = asked(*(NEVER_LOADED,) * 3)
    entries.append({"event": "unrejected", "manifest": "m"})
    assert never_loaded(entries, "m", "q", "h1", dead) == 0


def test_delays_grow_from_nothing_to_a_bound() -> None:
    delays = [delay_seconds(failures) for failures in range(12)]
    assert delays[:4] == [0, 2, 4, 8]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_SECONDS


def attempt(**changes: Json) -> dict[str, Json]:
    entry: dict[str, Json] = {"event": "attempt", "action": "reuse", "boot": "b", "manifest": "m"}
    return entry | {"time": 5.0, "host_boot": "h1", "pid": 7, "pid_start": 70} | changes


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], UNUSED, id="nothing is known"),
        pytest.param([attempt()], Use(5.0, False, ((7, 70),)), id="served"),
        pytest.param(
            [attempt(), attempt(time=9, boot="c", pid=8)],
            Use(9.0, False, ((7, 70), (8, 70))),
            id="the latest counts, and every process",
        ),
        pytest.param([attempt(action="serve-source")], UNUSED, id="the source was served"),
        pytest.param([attempt(manifest="other")], UNUSED, id="another was served"),
        pytest.param([attempt(host_boot="h0")], Use(5.0), id="before the host booted"),
        pytest.param(
            [attempt(), {"event": "loaded", "boot": "b"}],
            Use(5.0, True, ((7, 70),)),
            id="and loaded",
        ),
        pytest.param(
            [attempt(), {"event": "loaded", "boot": "c"}],
            Use(5.0, False, ((7, 70),)),
            id="another boot loaded",
        ),
        pytest.param(
            [
                *(attempt(), {"event": "loaded", "boot": "b"}, attempt(time=9, boot="c")),
                *({"event": event, "boot": "c"} for event in ("loading", "fell-back", "healthy")),
            ],
            Use(5.0, True, ((7, 70), (7, 70))),
            id="another boot fell back",
        ),
        pytest.param(
            [attempt(), *({"event": event, "boot": "b"} for event in ("fell-back", "healthy"))],
            Use(0.0, False, ((7, 70),)),
            id="it fell back",
        ),
        pytest.param([{"event": "loaded", "boot": "b"}], UNUSED, id="of a boot long forgotten"),
        pytest.param(
            [attempt(time=t) for t in ("x", None, -1, float("nan"), float("inf"), 10**400)],
            Use(0.0, False, ((7, 70),) * 6),
            id="times that are none",
        ),
        pytest.param([attempt(manifest=["m"]), attempt(boot=None, pid={})], None, id="odd lines"),
    ],
)
def test_what_boots_have_done_with_a_checkpoint(
    entries: list[dict[str, Json]], expected: Use | None
) -> None:
    found = uses(entries, "h1").get("m", UNUSED)
    assert expected is None or found == expected


def test_a_boot_that_is_still_loading_has_not_failed_whatever_a_lock_says() -> None:
    entries = ledger(FAILED, FAILED, FAILED)
    for number, entry in enumerate(e for e in entries if e["event"] == "attempt"):
        entry |= {"pid": 100 + number, "pid_start": 7}
    assert failures_in_row(entries, "m", "h1", lambda *one: one[:2] == (102, 7)) == 2
    assert failures_in_row(entries, "m", "h1", lambda *one: one[:2] == (102, 8)) == 3


@pytest.mark.parametrize(
    ("oldest", "alive", "expected"),
    [
        pytest.param(SERVED, True, 0, id="it has loaded, and runs"),
        pytest.param(SERVED, False, 3, id="it has loaded, and runs no more"),
        pytest.param(FAILED, True, 3, id="it is still loading"),
        pytest.param(FELL_BACK, True, 3, id="it runs, and serves the source"),
        pytest.param(STOPPED, True, 3, id="it was told to stop"),
    ],
)
def test_what_another_server_has_loaded_is_no_reason_to_die(
    oldest: tuple[str, ...], alive: bool, expected: int
) -> None:
    entries = ledger(oldest, FAILED, FAILED, FAILED)
    entries[0] |= {"pid": 100, "pid_start": 7, "pid_namespace": "n"}
    assert (
        failures_in_row(entries, "m", "h1", lambda *one: alive and one == (100, 7, "n")) == expected
    )


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        pytest.param((), "some", id="none since the host was started"),
        pytest.param((SERVED,), "all", id="died after loading"),
        pytest.param((SERVED, SERVING), "", id="the latest has served"),
        pytest.param((SERVING, SERVED), "all", id="the one before has served"),
        pytest.param(((*SERVED, "healthy"),), "", id="seen to be healthy"),
        pytest.param((TOLD,), "", id="told to stop while it warmed up"),
        pytest.param((FELL_BACK,), "", id="loaded the source instead"),
        pytest.param((FAILED,), "", id="died while loading, which no caches do"),
        pytest.param((SERVED, NEVER_LOADED), "all", id="bad flags tell nothing"),
    ],
)
def test_caches_are_distrusted_by_what_the_latest_boot_with_them_came_to(
    boots: tuple[tuple[str, ...], ...], expected: str
) -> None:
    assert distrust(ledger(*boots), "m", "h1", dead) == expected


def test_caches_are_moved_away_once_until_a_boot_has_served() -> None:
    died = ledger(SERVED)
    assert distrust([*died, RENEWED], "m", "h1", dead) == ""
    assert distrust([*died, RENEWED | {"manifest": "another"}], "m", "h1", dead) == "all"
    again = ledger(SERVED, SERVED)
    assert distrust([*again[:3], RENEWED, *again[3:]], "m", "h1", dead) == ""
    served = ledger(SERVED, SERVING, SERVED)
    assert distrust([*served[:3], RENEWED, *served[3:]], "m", "h1", dead) == "all"


def test_caches_of_a_server_that_runs_are_not_distrusted() -> None:
    assert distrust(ledger(SERVED), "m", "h1", lambda *_: True) == ""


def test_caches_may_be_torn_where_the_host_was_started_anew() -> None:
    assert distrust(ledger(SERVED), "m", "h2", dead) == "some"
    assert distrust(ledger(SERVED), "another", "h1", dead) == "some"


def test_caches_are_known_to_serve_by_a_boot_that_served_with_them() -> None:
    assert not has_served(ledger(SERVED), "m")
    assert has_served(ledger(SERVED, SERVING, SERVED), "m")
    assert not has_served(ledger(SERVING), "another")
    assert not has_served([*ledger(SERVING), RENEWED], "m")
    again = ledger(SERVING, SERVING)
    assert has_served([*again[:4], RENEWED, *again[4:]], "m")


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        pytest.param((), 0, id="none yet"),
        pytest.param((FAILED, SERVED), 2, id="died while loading, or after it"),
        pytest.param((SERVED, SERVING, SERVED), 1, id="one that served ends the row"),
        pytest.param((SERVED, (*SERVED, "healthy")), 0, id="seen to be healthy"),
        pytest.param((SERVED, (*SERVED, "tee.failed")), 0, id="given up, and no harm done"),
        pytest.param((SERVED, (*SERVED, "tee.done")), 0, id="done"),
        pytest.param((SERVED, TOLD, NEVER_LOADED), 1, id="a stop, and bad flags, tell nothing"),
        pytest.param((SERVING, TOLD), 0, id="a rollout aborted"),
    ],
)
def test_boots_that_died_while_they_saved_on_the_way(
    boots: tuple[tuple[str, ...], ...], expected: int
) -> None:
    entries: list[dict[str, Json]] = []
    for entry in ledger(*boots):
        told: dict[str, Json] = {"action": "tee", "family": "f", "manifest": None}
        entries.append(entry | told if entry["event"] == "attempt" else entry)
    assert tees_died(entries, "f", dead) == expected
    assert tees_died(entries, "another", dead) == 0
    assert tees_died(entries, "f", lambda *_: True) == 0
    assert tees_died(ledger(*boots), "f", dead) == 0
