from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lease_driver import WHAT, Node, pace

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.errors import ManifestError
from entrypoint.store import lease, tree
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.lease import LEASES, Waited
from entrypoint.store.sweep import sweep

SOON = 0.5
"""A time to live that a test can wait for."""

BOUND = 30.0

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


def names(root: Path) -> list[str]:
    """Return who stands in line; a line that nobody stands in is taken away."""
    directory = root / LEASES / WHAT
    return sorted(os.listdir(directory)) if directory.exists() else []


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def plant(root: Path, name: str, content: bytes = b"0000000001 1 elsewhere another-boot\n") -> Path:
    path = root / LEASES / WHAT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def wait(root: Path, ttl: float = 60, seconds: float = BOUND) -> tuple[str, list[str]]:
    told: list[str] = []
    with lease.queue(root, WHAT, pace=pace(ttl)) as ticket:
        waited: Waited[str] = ticket.wait(1, seconds, on_wait=told.append)
    return waited.how, told


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


def _a_file_is_in_the_way(root: Path) -> None:
    (root / LEASES).write_text("")


def _a_link_is_in_the_way(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / LEASES).symlink_to(root / "elsewhere")


def _it_is_gone(root: Path) -> None:
    root.rmdir()


def _it_is_not_ours(root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root.chmod(0o555)


@pytest.mark.parametrize(
    "spoil", [_a_file_is_in_the_way, _a_link_is_in_the_way, _it_is_gone, _it_is_not_ours]
)
def test_where_no_ticket_can_be_written_nobody_waits(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    spoil(root)
    how, (told,) = wait(root)
    assert how == "without"
    assert told.startswith(f"{root / LEASES / WHAT}: no queue (")


def test_a_full_disk_leaves_no_half_of_a_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tree, "write_all", fail)
    with lease.queue(tmp_path, WHAT, pace=pace()) as ticket:
        assert names(tmp_path) == []
        assert ticket.wait(1, BOUND).how == "without"


def test_a_store_that_goes_away_under_a_waiter_ends_the_wait(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    plant(root, "000001.other.7.00000000")

    def look() -> None:
        if root.exists():
            root.rename(tmp_path / "gone")

    with lease.queue(root, WHAT, pace=pace()) as ticket:
        assert ticket.wait(1, BOUND, look).how == "without"


@pytest.mark.parametrize(
    "name",
    [
        *("notes", ".nfs0001", "000001", "0000001.other.7.00000000", "1.other.7.00000000"),
        *("000001.an other.7.00000000", "000001.\x1b[31m.7.00000000"),
        *("000001.other.7.0000000G", "000001.other.-7.00000000", "٠٠٠٠٠١.other.7.00000000"),  # noqa: RUF001
    ],
)
def test_what_is_no_ticket_is_nobody(name: str, tmp_path: Path) -> None:
    plant(tmp_path, name)
    assert wait(tmp_path) == ("turn", [])
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(
    "content", [b"", b"1", b"\xff" * 100, b"x" * 1000, b"1 " * 100, b"0 9999999999999999 a b"]
)
def test_whatever_a_ticket_holds_it_dies_when_it_does_not_change(
    content: bytes, tmp_path: Path
) -> None:
    plant(tmp_path, "000001.other.7.00000000", content)
    assert wait(tmp_path, ttl=SOON)[0] == "turn"
    assert names(tmp_path) == []


def test_a_dead_ticket_that_cannot_be_deleted_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / LEASES / WHAT / "000001.other.7.00000000").mkdir(parents=True)
    os.mkfifo(tmp_path / LEASES / WHAT / "000002.other.7.00000000")
    assert wait(tmp_path, ttl=SOON)[0] == "turn"
    assert names(tmp_path) == ["000001.other.7.00000000"]


def test_no_number_is_too_high(tmp_path: Path) -> None:
    plant(tmp_path, "999999999.other.7.00000000")
    with lease.queue(tmp_path, WHAT, pace=pace(SOON)) as ticket:
        assert [name[:10] for name in names(tmp_path)] == ["999999999."] * 2
        assert ticket.wait(1, BOUND).how == "turn"


def test_a_directory_full_of_names_is_no_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_MOST_NAMES", 3)
    for number in range(3):
        plant(tmp_path, f"junk-{number}")
    how, (told,) = wait(tmp_path)
    assert (how, told.endswith("no queue (3 names or more); going on without")) == ("without", True)
    assert len(names(tmp_path)) == 3


def test_of_a_long_line_only_the_first_few_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 101):
        plant(tmp_path, f"{number:06}.other.7.00000000")
    read: set[str] = set()

    def note(path: Path, limit: int) -> bytes:
        read.add(path.name[:6])
        return read_bounded(path, limit)

    monkeypatch.setattr(lease, "read_bounded", note)
    assert wait(tmp_path, seconds=SOON)[0] == "late"
    assert sorted(read) == [f"{number:06}" for number in range(1, 10)]


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


def test_who_comes_for_moments_only_sees_a_foreign_ticket_die_in_the_end(tmp_path: Path) -> None:
    dead = plant(tmp_path, "000001.elsewhere.1.0badf00d")
    hows: list[str] = []

    def came_to_a_turn() -> bool:
        hows.append(wait(tmp_path, ttl=SOON, seconds=SOON / 3)[0])
        return hows[-1] != "late"

    until(came_to_a_turn)
    assert hows[0] == "late"
    assert hows[-1] == "turn"
    assert not dead.exists()
