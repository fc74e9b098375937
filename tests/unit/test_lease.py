from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lease_driver import BOUND, SOON, WHAT, Node, names, pace, plant, wait
from waiting import until

from entrypoint.errors import ManifestError
from entrypoint.store import lease
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.lease import LEASES, Waited
from entrypoint.store.sweep import sweep

Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[Node] = []

    def begin(limit: int = 1, ttl: float = 60) -> Node:
        nodes.append(Node(tmp_path, limit, ttl))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.close()


@pytest.mark.parametrize("limit", [1, 2])
def test_as_many_as_may_have_their_turn_and_the_first_to_come_are_the_first(
    limit: int, start: Start
) -> None:
    nodes = [start(limit) for _ in range(5)]
    turns: list[float] = []
    ends: list[float] = []
    for node in nodes:
        turns.append(node.had_turn())
        if len(turns) >= limit:
            ends.append(nodes[len(ends)].let_go())
    ends += [node.let_go() for node in nodes[len(ends) :]]
    assert all(ends[n] <= turns[n + limit] for n in range(5 - limit))
    assert names(nodes[0].directory.parents[1]) == []


def test_a_store_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        monkeypatch.setattr(lease, "within", lambda *_: None)
        assert ticket.wait(1, BOUND, on_wait=said.append) == Waited[None]("without")
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        assert ticket.wait(1, BOUND) == Waited[None]("without")
    assert "does not answer" in said[0]


def test_a_store_that_falls_silent_under_a_waiter_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def falls_silent(*_: object) -> bytes:
        # Seen by a child alone: a waiter would be held for ever.
        assert os.getpid() != me
        time.sleep(1000)
        raise AssertionError

    me = os.getpid()
    plant(tmp_path, "000001.other.7.00000000")
    monkeypatch.setattr(lease, "_ANSWER_SECONDS", 0.2)
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        monkeypatch.setattr(lease, "read_bounded", falls_silent)
        said: list[str] = []
        assert ticket.wait(1, BOUND, on_wait=said.append) == Waited[None]("without")
        monkeypatch.undo()
    assert "does not answer" in said[0]


def test_one_who_is_alone_has_its_turn_and_leaves_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        assert ticket.wait(1, BOUND) == Waited[None]("turn")
        assert threading.active_count() == before + 1
        (name,) = names(tmp_path)
        assert name.startswith("000001.")
        first = (ticket.directory / name).read_bytes()
        until(lambda: (ticket.directory / name).read_bytes() != first)
        assert len((ticket.directory / name).read_bytes()) == len(first)
    assert threading.active_count() == before
    assert names(tmp_path) == []


def test_tickets_have_the_modes_of_the_store(tmp_path: Path) -> None:
    with lease.queue(tmp_path, WHAT, 0o2770, 0o660, pace()) as ticket:
        modes = [tmp_path / LEASES, ticket.directory, *ticket.directory.iterdir()]
        assert [path.stat().st_mode & 0o7777 for path in modes] == [0o2770, 0o2770, 0o660]


def test_a_killed_process_of_this_host_is_not_waited_for(tmp_path: Path, start: Start) -> None:
    holder, waiter = start(), start()
    holder.had_turn()
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    waiter.had_turn()
    assert names(tmp_path) == waiter.tickets


def test_a_killed_process_of_another_host_is_waited_for_until_its_ticket_is_old(
    tmp_path: Path, start: Start
) -> None:
    holder = start()
    holder.had_turn()
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    (name,) = names(tmp_path)
    plant(tmp_path, name)
    began = time.monotonic()
    how, told = wait(tmp_path, ttl=SOON)
    assert how == "turn"
    assert time.monotonic() - began >= SOON
    assert len(told) == 1
    assert told[0].endswith(f", process {holder.process.pid}")
    assert names(tmp_path) == []


def test_a_stopped_process_loses_its_turn_and_goes_on_without_a_ticket(
    tmp_path: Path, start: Start
) -> None:
    holder, waiter = start(ttl=SOON), start(ttl=SOON)
    holder.had_turn()
    holder.process.send_signal(signal.SIGSTOP)
    waiter.had_turn()
    holder.process.send_signal(signal.SIGCONT)
    holder.let_go()
    assert names(tmp_path) == waiter.tickets


def test_a_live_holder_is_waited_for_however_old_its_ticket_is(
    tmp_path: Path, start: Start
) -> None:
    holder = start()
    holder.had_turn()
    assert wait(tmp_path, ttl=SOON, seconds=3 * SOON)[0] == "late"
    assert names(tmp_path) == holder.tickets


def test_what_is_found_meanwhile_ends_the_wait(tmp_path: Path, start: Start) -> None:
    start().had_turn()
    found = iter([None, None, "a checkpoint"])
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        assert ticket.wait(1, BOUND, lambda: next(found)) == Waited("found", "a checkpoint")
    assert len(names(tmp_path)) == 1


def test_what_the_one_before_left_behind_is_looked_for_when_the_turn_comes(
    tmp_path: Path, start: Start
) -> None:
    holder = start()
    holder.had_turn()
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        before = tmp_path.stat().st_mtime_ns

        def look() -> str | None:
            """See what is new as an NFS client does: not before it has changed the root itself."""
            if holder.process.poll() is None:
                holder.let_go()
            return "a checkpoint" if tmp_path.stat().st_mtime_ns != before else None

        assert ticket.wait(1, BOUND, look) == Waited("found", "a checkpoint")


def test_the_bound_passes(tmp_path: Path, start: Start) -> None:
    holders = [start(), start()]
    began = time.monotonic()
    how, told = wait(tmp_path, seconds=SOON)
    assert how == "late"
    assert SOON <= time.monotonic() - began < BOUND
    assert len(told) == 1
    assert told[0].endswith(f", process {holders[0].process.pid} and 1 more")


def test_a_waiter_whose_ticket_is_deleted_stands_at_the_end(tmp_path: Path, start: Start) -> None:
    holder, robbed, last = start(), start(), start()
    holder.had_turn()
    (old,) = robbed.tickets
    (robbed.directory / old).unlink()
    until(lambda: [name for name in robbed.tickets if name[:6] > last.tickets[0][:6]])
    holder.let_go()
    last.had_turn()
    left = last.let_go()
    assert robbed.had_turn() >= left


def test_a_holder_whose_ticket_is_deleted_goes_on(tmp_path: Path, start: Start) -> None:
    holder, waiter = start(), start()
    holder.had_turn()
    (name,) = holder.tickets
    (holder.directory / name).unlink()
    waiter.had_turn()
    assert holder.tickets == []
    holder.let_go()
    assert names(tmp_path) == waiter.tickets


def test_a_signal_that_raises_leaves_neither_ticket_nor_thread(tmp_path: Path) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def raise_it(*_: object) -> None:
        raise Stop

    before, old = threading.active_count(), signal.signal(signal.SIGUSR1, raise_it)
    try:
        with (
            contextlib.suppress(Stop),
            lease.queue(tmp_path, WHAT, pace=pace()) as ticket,
        ):
            ticket.wait(1, BOUND, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            pytest.fail("it went on")
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert threading.active_count() == before
    assert names(tmp_path) == []


def test_a_name_that_leaves_the_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError), lease.queue(tmp_path, "../out"):
        pytest.fail("it was made")


def test_leases_are_no_checkpoint_and_nothing_to_sweep(tmp_path: Path) -> None:
    with lease.queue(tmp_path, WHAT, pace=pace()):
        assert DirectoryStore(tmp_path).names() == []
        assert sweep(tmp_path, 0) == []
        assert len(names(tmp_path)) == 1
