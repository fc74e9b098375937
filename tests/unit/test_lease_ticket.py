"""What stands in a queue's way or place costs nobody more than a ticket's time to live."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lease_driver import BOUND, SOON, WHAT, names, pace, plant, wait
from waiting import until

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.store import lease, tree
from entrypoint.store.lease import LEASES


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


def test_who_comes_for_moments_only_sees_a_foreign_ticket_die_in_the_end(tmp_path: Path) -> None:
    dead = plant(tmp_path, "000001.elsewhere.1.0badf00d")
    hows: list[str] = []

    def came_to_a_turn() -> bool:
        hows.append(wait(tmp_path, ttl=SOON, seconds=SOON / 3)[0])
        return hows[-1] == "turn"

    until(came_to_a_turn)
    assert hows[0] == "late"
    assert not dead.exists()
