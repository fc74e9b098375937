"""Signals, time limits and dead children: nobody is left behind, and stores stay clean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from blackbox.harness import House, is_gone, snapshot, staged
from store_contract import deep_verify

STOPS = [
    pytest.param(signal.SIGTERM, 143, id="TERM"),
    pytest.param(signal.SIGINT, 130, id="INT"),
    pytest.param(signal.SIGHUP, 129, id="HUP"),
]


AS_REAPER = (
    *(sys.executable, "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.argv[1], sys.argv[1:])",
)
"""A container's first process inherits orphans; so does a subreaper (PR_SET_CHILD_SUBREAPER)."""


def processes_of(house: House) -> list[int]:
    return [int(pid) for pid in (house.root / "hanging").read_text().split()]


def stop(process: subprocess.Popen[str], number: int) -> float:
    started = time.monotonic()
    process.send_signal(number)
    process.wait(10)
    return time.monotonic() - started


@pytest.mark.parametrize(("number", "status"), STOPS)
def test_a_signal_during_a_save_ends_its_whole_group_at_once(
    house: House, number: int, status: int
) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    assert len(list(staged(house.local))) == 1
    stop(process, number)
    boot = house.finish(process)
    assert (boot.status, boot.vllm) == (status, {})
    assert all(is_gone(pid) for pid in processes_of(house))
    assert not list(staged(house.local))
    assert house.store.names() == []
    assert "Traceback" not in boot.stderr


def start_a_copy_that_hangs(house: House) -> subprocess.Popen[str]:
    house.serve()
    house.shared_copy()
    words = ("serve", house.model, "-tp", 2)
    process = house.start(*words, SHARDBOOT_SHARED=house.shared, **house.slow_reads())
    house.wait_for("reading")
    assert len(list(staged(house.local))) == 1
    return process


def the_next_boot_goes_on(house: House) -> None:
    assert len(list(staged(house.local))) == 1
    boot = house.serve(SHARDBOOT_SHARED=house.shared)
    assert boot.events[-3:] == ["copy.resumed", "copy.done", "local.hit"]
    assert not list(staged(house.local))
    deep_verify(house.store, house.store.names()[0])


@pytest.mark.parametrize(("number", "status"), STOPS)
def test_a_signal_during_a_copy_that_hangs_ends_it_at_once(
    house: House, number: int, status: int
) -> None:
    process = start_a_copy_that_hangs(house)
    seconds = stop(process, number)
    boot = house.finish(process)
    assert (boot.status, boot.vllm) == (status, {})
    assert seconds < 5
    assert house.store.names() == []
    assert "Traceback" not in boot.stderr
    the_next_boot_goes_on(house)


def test_the_next_boot_goes_on_with_a_copy_that_was_killed(house: House) -> None:
    process = start_a_copy_that_hangs(house)
    stop(process, signal.SIGKILL)
    assert house.finish(process).status == -signal.SIGKILL
    the_next_boot_goes_on(house)


def test_a_signal_while_vllm_is_asked_ends_the_asking(house: House) -> None:
    house.rules(resolve={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    stop(process, signal.SIGTERM)
    assert house.finish(process).status == 143
    assert all(is_gone(pid) for pid in processes_of(house))


def test_a_save_that_is_deaf_to_signals_delays_the_end_by_seconds(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    assert stop(process, signal.SIGTERM) < 5


def test_a_second_signal_does_not_interrupt_the_cleaning_up(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert house.finish(process).status in (143, 130)
    assert all(is_gone(pid) for pid in processes_of(house))
    assert not list(staged(house.local))


def test_a_policy_to_survive_failures_does_not_survive_a_signal(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", "--on-failure", "serve-source", house.model, "-tp", 2)
    house.wait_for("hanging")
    stop(process, signal.SIGTERM)
    assert "serve" not in house.calls


def test_a_save_that_takes_too_long_is_ended_and_the_source_is_served(house: House) -> None:
    house.rules(save={"hang": True, "print": "still compiling"})
    boot = house.serve(SHARDBOOT_SAVE_TIMEOUT="5s")
    assert boot.events[-2:] == ["save.timeout", "save.timeout"]
    assert boot.words == [str(house.model), "-tp", "2"]
    assert all(is_gone(pid) for pid in processes_of(house))
    assert not list(staged(house.local))
    [log] = (house.state / "logs").iterdir()
    assert log.read_text() == "still compiling\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_save_child_that_dies_takes_nothing_with_it(house: House, number: int) -> None:
    house.rules(save={"kill": number})
    boot = house.serve()
    assert "save.failed" in boot.events
    assert str(-number) in boot.stderr
    assert boot.words == [str(house.model), "-tp", "2"]
    assert not list(staged(house.local))


def test_what_a_dead_save_child_leaves_to_a_first_process_is_reaped(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2, prefix=AS_REAPER)
    house.wait_for("hanging")
    os.kill(processes_of(house)[0], signal.SIGKILL)
    boot = house.finish(process)
    assert "save.failed" in boot.events
    assert boot.vllm["children"] == []


def test_killed_without_warning_it_leaves_no_checkpoint_and_the_next_boot_saves(
    house: House,
) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    assert stop(process, signal.SIGKILL) < 5
    house.finish(process)
    # Only the real save child asks the kernel to die with its parent.
    house.end_hanging()
    house.rules()
    assert house.store.names() == []
    assert house.serve().events[-2:] == ["save.done", "local.hit"]


PATIENT = 99
"""The stub ends at once, and never comes to loading: no fault of what it was given."""


def test_sixteen_boots_at_once_save_once_and_all_serve(house: House) -> None:
    words = ("serve", house.model, "-tp", 2)
    processes = [house.start(*words, SHARDBOOT_QUARANTINE_AFTER=PATIENT) for _ in range(16)]
    boots = [house.finish(process, 120) for process in processes]
    assert [boot.status for boot in boots] == [0] * 16, [b.stderr for b in boots if b.status]
    assert house.calls.count("save") == 1
    assert house.calls.count("serve") == 16
    (name,) = house.store.names()
    # With few cores a look at the source may take one of them too long; it says so.
    late = [boot for boot in boots if "source.hung" in boot.events]
    assert {boot.words[0] for boot in boots if boot not in late} == {str(house.local / name)}
    assert {boot.words[0] for boot in late} <= {str(house.local / name), str(house.model)}
    assert not list(staged(house.local))
    assert len(house.attempts) == 16


def test_sixteen_boots_at_once_copy_once_and_all_serve(house: House) -> None:
    house.serve()
    house.shared_copy()
    words = ("serve", house.model, "-tp", 2)
    told: dict[str, Any] = {"SHARDBOOT_SHARED": house.shared}
    told |= {"SHARDBOOT_QUARANTINE_AFTER": PATIENT}
    processes = [house.start(*words, **told) for _ in range(16)]
    boots = [house.finish(process, 120) for process in processes]
    assert [boot.status for boot in boots] == [0] * 16, [b.stderr for b in boots if b.status]
    copies = [event for boot in boots for event in boot.events if event.startswith("copy.")]
    assert copies == ["copy.done"]
    assert house.calls.count("save") == 1
    assert not list(staged(house.local))


def test_boots_of_other_models_do_not_wait_for_each_other(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    house.rules()
    assert house.run("serve", house.model, "-tp", 1).events[-1] == "local.hit"
    stop(process, signal.SIGTERM)


def test_a_boot_that_waits_for_another_gives_up_after_the_save_timeout(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    boot = house.serve(SHARDBOOT_SAVE_TIMEOUT="1s")
    assert "lock.wait" in boot.events
    assert boot.events[-1] == "lock.timeout"
    assert str(process.pid) in boot.stderr
    assert boot.words == [str(house.model), "-tp", "2"]
    stop(process, signal.SIGTERM)


def test_what_a_parent_ignores_stays_ignored_until_exec(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2, prefix=("nohup",))
    house.wait_for("hanging")
    process.send_signal(signal.SIGHUP)
    stop(process, signal.SIGTERM)
    # Not 129: signals that wait are handled lowest first.
    assert process.returncode == 143


def test_where_a_parent_ignores_the_end_of_children_ours_are_waited_for(house: House) -> None:
    house.serve()
    words = ("serve", house.model, "-tp", 2)
    boot = house.finish(house.start(*words, prefix=("env", "--ignore-signal=CHLD")))
    assert boot.events[-1] == "local.hit"
    assert boot.vllm["signals"]["SigIgn"] == 0


def test_an_interrupted_plan_leaves_no_trace(house: House) -> None:
    house.local.mkdir()
    before = snapshot(house.local)
    house.rules(resolve={"hang": True})
    process = house.start("plan", house.model, "-tp", 2)
    house.wait_for("hanging")
    stop(process, signal.SIGINT)
    assert house.finish(process).status == 130
    assert snapshot(house.local) == before
