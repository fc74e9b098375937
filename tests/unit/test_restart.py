"""What follows from the end of a server."""

from __future__ import annotations

import pytest

from entrypoint.supervise.restart import GAVE_UP, Again, End, GiveUp, follow

CRASH = End(status=139, served=None, began=True)


def test_the_first_restart_is_at_once_and_the_next_ones_wait_ever_longer() -> None:
    delays = [follow(CRASH, row, 10, 60.0) for row in range(7)]
    assert [a.delay for a in delays if isinstance(a, Again)] == [0, 2, 4, 8, 16, 32, 60]


def test_after_too_many_in_a_row_it_is_given_up() -> None:
    assert isinstance(follow(CRASH, 9, 10, 60.0), Again)
    assert follow(CRASH, 10, 10, 60.0) == GiveUp(
        GAVE_UP, "vLLM was ended by signal 11 before it served; 10 restarts in a row did not help"
    )


def test_without_a_limit_it_is_never_given_up() -> None:
    assert follow(CRASH, 10_000, 0, 60.0) == Again(60.0, 10_001)


@pytest.mark.parametrize(("served", "number"), [(None, 5), (9.0, 5), (10.0, 1)])
def test_who_has_served_for_a_while_begins_a_new_row(served: float | None, number: int) -> None:
    after = follow(CRASH._replace(served=served), 4, 10, 60.0)
    assert isinstance(after, Again)
    assert after.number == number


def test_a_boot_that_never_came_to_vllm_is_not_repeated() -> None:
    refused = End(status=31, served=None, began=False)
    assert follow(refused, 0, 10, 60.0) == GiveUp(31, "the boot ended with 31 before it served")


@pytest.mark.parametrize("status", [126, 127])
def test_a_vllm_that_cannot_be_executed_is_not_tried_again(status: int) -> None:
    end = End(status, served=None, began=True)
    assert follow(end, 0, 0, 60.0) == GiveUp(status, f"vLLM ended with {status} before it served")
    assert follow(end._replace(served=1.0), 0, 0, 60.0) == Again(0.0, 1)


def test_a_boot_that_was_killed_had_nothing_to_say_and_is_repeated() -> None:
    killed = End(status=137, served=None, began=False)
    assert follow(killed, 0, 10, 60.0) == Again(0.0, 1)


def test_vllm_ends_with_0_when_a_worker_has_died_and_is_started_again() -> None:
    assert follow(End(0, 5.0, began=True), 0, 10, 60.0) == Again(0.0, 1)
