"""Renames, locks and events, as a second process sees them; and file systems that lie."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.insight import pace, promises
from entrypoint.insight.crew import together
from entrypoint.insight.pace import Lane

SECONDS = 0.1


def test_renames_of_a_local_disk_are_atomic(tmp_path: Path) -> None:
    over = promises.rename_over(tmp_path, tmp_path, SECONDS)
    assert over.is_atomic
    assert over.renames > 0
    assert over.looks > 0
    into = promises.rename_into(tmp_path, tmp_path, SECONDS)
    assert into.is_atomic
    assert into.renames > 0
    assert into.looks >= into.renames


def test_a_reader_who_finds_no_file_or_half_of_one_says_so(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    seen = promises.rename_over(here, there, SECONDS)
    assert seen.missing == seen.looks > 0
    (there / "current").write_bytes(promises.record(1)[:-1])
    seen = promises.rename_over(here, there, SECONDS)
    assert seen.torn == seen.looks > 0
    (there / "current").unlink()
    (there / "current").mkdir()
    seen = promises.rename_over(here, there, SECONDS)
    assert seen.failed == seen.looks > 0
    assert seen.is_atomic


def test_a_reader_who_finds_half_a_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "is_whole", lambda data: data[:8] != bytes(8))
    seen = promises.rename_into(tmp_path, tmp_path, SECONDS)
    assert seen.torn == 1
    assert not seen.is_atomic
    assert seen.renames > 0


def test_what_does_not_show_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "SEEN_SECONDS", 0.1)
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="does not see it within"):
        promises.rename_into(tmp_path, tmp_path / "there", SECONDS)


@pytest.mark.parametrize(
    ("flock", "says"),
    [
        (fcntl.flock, "honoured"),
        (lambda *_: None, "ignored"),
        (lambda *_: os.open("/none/such", 0), "unsupported"),
    ],
    ids=["true", "lying", "none"],
)
def test_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: Callable[..., None], says: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    assert promises.lock(tmp_path, tmp_path) == says


def test_a_lock_that_outlives_its_holder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "_FREED_SECONDS", 0.05)
    (tmp_path / "there").mkdir()
    with (tmp_path / "there" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert promises.lock(tmp_path, tmp_path / "there") == "kept"


def test_events_are_of_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "_EVENT_SECONDS", 0.1)
    (tmp_path / "other").mkdir()
    assert promises.notices(tmp_path, (tmp_path / "a").touch)
    assert not promises.notices(tmp_path, (tmp_path / "other" / "b").touch)
    with pytest.raises(FileNotFoundError):
        promises.notices(tmp_path / "none", lambda: None)


def test_mapping_is_tried_where_it_kills_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    assert promises.can_map(tmp_path / "file")
    (tmp_path / "empty").touch()
    assert not promises.can_map(tmp_path / "empty")
    assert not promises.can_map(tmp_path / "none")


def test_large_files_are_written_and_read_whole(tmp_path: Path) -> None:
    size = 2 * PIECE_BYTES + 4096
    paths = [tmp_path / "a", tmp_path / "b"]
    rate = pace.write(paths, size, 60)
    assert (rate.workers, rate.amount) == (2, 2 * size)
    assert [path.stat().st_size for path in paths] == [size, size]
    lanes = [Lane(paths[0], 0, size), *pace.lanes_of(paths[1], 0, size, 2)]
    assert len(lanes) == 3
    read, way = pace.read_cold(lanes, 60, is_ours=True)
    assert read.amount == 2 * size
    assert way in ("O_DIRECT", "posix_fadvise")


def test_writing_ends_in_time(tmp_path: Path) -> None:
    rate = pace.write([tmp_path / "a"], 1 << 40, 0.01)
    assert 0 < rate.amount < 1 << 31


def test_where_direct_reads_are_refused_only_our_own_pages_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *words: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, *words)

    (tmp_path / "a").write_bytes(b"x" * 4096)
    monkeypatch.setattr(os, "open", refuse)
    lanes = [Lane(tmp_path / "a", 0, 4096)]
    ways = [pace.read_cold(lanes, 1, is_ours=ours)[1] for ours in (True, False)]
    assert ways == ["posix_fadvise", "as it lies"]


def test_small_files_are_made_visited_and_gone(tmp_path: Path) -> None:
    made = pace.make_small(tmp_path / "small", 2, 100, SECONDS, synced=False)
    seen = pace.visit_small(tmp_path / "small", 2, 60, Path.stat)
    gone = pace.visit_small(tmp_path / "small", 2, 60, Path.unlink)
    assert 100 >= made.amount == seen.amount == gone.amount > 0
    assert [path for path in (tmp_path / "small").rglob("*") if path.is_file()] == []


def test_fsync_is_timed_one_by_one(tmp_path: Path) -> None:
    latency = pace.sync_latency(tmp_path / "synced", SECONDS)
    assert latency.times >= 1
    assert 0 < latency.median <= latency.p99


def test_the_failure_of_one_of_many_is_everybodys() -> None:
    def fail(number: int, begin: Callable[[], None]) -> int:
        begin()
        if number == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return 1

    with pytest.raises(OSError, match="quota") as caught:
        together(3, fail)
    assert caught.value.errno == errno.EDQUOT


def test_one_of_many_who_is_killed_is_an_error() -> None:
    def die(number: int, begin: Callable[[], None]) -> int:
        begin()
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(OSError, match="was killed"):
        together(2, die)
