"""The sidecar's loop with hints from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from entrypoint.errors import Interrupted, StoreError
from entrypoint.sidecar import loop
from entrypoint.sidecar.loop import Job

BOUND = 30.0


class Rounds:
    """What was done, in order, until there was enough of it."""

    def __init__(self, most: int, then: Callable[[], None] = lambda: None) -> None:
        self.names: list[str] = []
        self.times: list[float] = []
        self._most, self._then = most, then

    def of(self, name: str) -> Callable[[], Iterator[float]]:
        def work() -> Iterator[float]:
            yield from ()
            self.names.append(name)
            self.times.append(time.monotonic())
            if len(self.names) == self._most:
                raise Interrupted(15)
            self._then()

        return work


def run(rounds: Rounds, hint: threading.Event, interval: float = BOUND) -> None:
    jobs = [
        Job("look", interval, rounds.of("look")),
        Job("far", interval, rounds.of("far"), is_hinted=True),
        Job("fetch", interval, rounds.of("fetch"), is_hinted=True),
    ]
    with pytest.raises(Interrupted):
        loop.run(jobs, print, hint)


def test_a_hint_has_those_done_at_once_that_heed_it_in_their_order() -> None:
    hint, rounds = threading.Event(), Rounds(5)
    timer = threading.Timer(0.2, hint.set)
    timer.start()
    began = time.monotonic()
    run(rounds, hint)
    timer.join()
    assert rounds.names == ["look", "far", "fetch", "far", "fetch"]
    assert time.monotonic() - began < BOUND / 2


def test_however_many_hints_there_are_it_is_one_look_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "HINT_SECONDS", 0.2)
    hint = threading.Event()
    hint.set()
    rounds = Rounds(9, hint.set)
    run(rounds, hint)
    looks = [at for name, at in zip(rounds.names, rounds.times, strict=True) if name == "far"]
    assert all(later - sooner > 0.15 for sooner, later in pairwise(looks[1:]))
    assert rounds.names.count("look") == 1


def test_a_hint_is_no_reason_to_try_what_failed_any_sooner() -> None:
    hint, rounds = threading.Event(), Rounds(4)

    def fail() -> Iterator[float]:
        rounds.names.append("fail")
        hint.set()
        yield from ()
        raise StoreError("away")

    jobs = [
        Job("look", BOUND, rounds.of("look"), is_hinted=True),
        Job("fails", BOUND, fail, is_hinted=True),
        Job("ends", 0.5, rounds.of("ends")),
    ]
    with pytest.raises(Interrupted):
        loop.run(jobs, print, hint)
    assert rounds.names == ["look", "fail", "ends", "look"]


def test_what_is_asked_for_is_done_at_once_whatever_it_rests_for() -> None:
    hint, rounds, told = threading.Event(), Rounds(3), list[str]()
    asked = Job("asked", BOUND, rounds.of("asked"), when_asked=lambda: told.append("told"))
    jobs = [asked, Job("other", BOUND, rounds.of("other"))]

    def ask() -> None:
        assert asked.ask()
        assert not asked.ask()
        hint.set()

    timer = threading.Timer(0.2, ask)
    timer.start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        loop.run(jobs, print, hint)
    timer.join()
    assert (rounds.names, told) == (["asked", "other", "asked"], ["told"])
    assert time.monotonic() - began < BOUND / 2


def test_what_goes_on_is_not_asked_for_once_more() -> None:
    job = Job("j", BOUND, lambda: iter([1.0]))
    job.turn(print)
    assert not job.ask()


def test_hints_without_end_keep_no_other_job_from_its_turn() -> None:
    hint = threading.Event()
    rounds = Rounds(30, hint.set)
    run(rounds, hint, interval=0.01)
    assert rounds.names.count("look") > 5
