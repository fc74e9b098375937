"""Which caches go, and that they go whole."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from entrypoint.caches import collect, place
from entrypoint.caches.retention import UNUSED_SECONDS, Kept, judge
from entrypoint.checkpoint.digest import Json
from entrypoint.state import process
from entrypoint.state.ledger import Ledger

NOW = 1_000_000_000.0
HOUR = 3600.0
DAY = 86400.0
MOST = 1000


def kept(name: str, hours: float = 2.0, size: int = 100, **facts: object) -> Kept:
    return Kept(name, size, NOW - hours * HOUR)._replace(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "reason", "goes"),
    [
        (kept("a"), "kept", False),
        (kept("a", hours=0.5, is_orphan=True), "young", False),
        (kept("a", is_orphan=True), "orphan", True),
        (kept("a", is_orphan=True, running="process 1"), "running", False),
        (kept("a", is_orphan=True, foreign="no lock"), "foreign", False),
        (kept("a", hours=31 * 24), "unused", True),
        (kept("a", hours=31 * 24, running="process 1"), "running", False),
        (kept("a", size=2 * MOST), "crowded", True),
        (kept("a", size=2 * MOST, hours=0.5), "young", False),
    ],
)
def test_one_goes_by_its_own_rule(one: Kept, reason: str, goes: bool) -> None:
    [verdict] = judge([one], HOUR, MOST, NOW)
    assert (verdict.reason, verdict.is_collected) == (reason, goes)


def test_the_least_recently_used_make_room_for_the_others() -> None:
    found = [kept(name, hours, size=400) for name, hours in (("b", 9), ("a", 2), ("c", 5))]
    verdicts = judge(found, HOUR, MOST, NOW)
    assert [(v.name, v.is_collected) for v in verdicts] == [("b", True), ("a", False), ("c", False)]


def test_what_goes_anyway_counts_for_nobodys_room() -> None:
    found = [kept("a", size=MOST), kept("b", hours=1.5, size=MOST, is_orphan=True)]
    assert [v.reason for v in judge(found, HOUR, MOST, NOW)] == ["kept", "orphan"]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def make(state: Path, store: Path, name: str, *, age: float = DAY) -> Path:
    """Make caches, and their checkpoint as far as it matters."""
    (store / name).mkdir(parents=True)
    (store / name / "manifest.json").write_text("{}")
    where = place.place_of(state, name)
    (where / "vllm").mkdir(parents=True)
    (where / "vllm" / "graph").write_bytes(b"x" * 100)
    (where / place.CHECKPOINT).write_text(str(store / name))
    os.utime(where, (time.time() - age,) * 2)
    return where


def run(state: Path, local: Path, *, most: int = MOST, dry_run: bool = False) -> dict[str, str]:
    done = collect.collect(state, local, HOUR, most, dry_run=dry_run)
    return {place.checkpoint_of(verdict.name): verdict.reason for verdict in done}


def test_caches_go_with_their_checkpoint(state: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    stays, goes = make(state, local, "a"), make(state, local, "b")
    (local / "b" / "manifest.json").unlink()
    assert run(state, local, dry_run=True) == {"a": "kept", "b": "orphan"}
    assert goes.exists()
    assert run(state, local) == {"a": "kept", "b": "orphan"}
    assert stays.exists()
    assert not goes.exists()
    assert os.listdir(state / "caches" / ".trash") == []


def test_a_checkpoint_that_lies_elsewhere_is_looked_for_there(state: Path, tmp_path: Path) -> None:
    where = make(state, tmp_path / "elsewhere", "a")
    assert run(state, tmp_path / "local") == {"a": "kept"}
    (where / place.CHECKPOINT).unlink()
    os.utime(where, (time.time() - DAY,) * 2)
    (tmp_path / "local" / "another").mkdir(parents=True)
    assert run(state, tmp_path / "local") == {"a": "orphan"}


def test_where_no_disk_is_mounted_no_checkpoint_is_gone(state: Path, tmp_path: Path) -> None:
    make(state, tmp_path / "local", "a")
    (tmp_path / "local").rename(tmp_path / "disk")
    assert run(state, tmp_path / "local") == {"a": "kept"}
    (tmp_path / "local").mkdir()
    assert run(state, tmp_path / "local") == {"a": "kept"}


def test_a_running_servers_stay_by_its_lock(state: Path, tmp_path: Path) -> None:
    where = make(state, tmp_path / "local", "a", age=UNUSED_SECONDS + DAY)
    descriptor = os.open(where, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert run(state, tmp_path / "local") == {"a": "running"}
    os.close(descriptor)
    assert run(state, tmp_path / "local") == {"a": "unused"}


def test_a_running_servers_stay_by_the_ledger_where_locks_lie(state: Path, tmp_path: Path) -> None:
    make(state, tmp_path / "local", "a", age=UNUSED_SECONDS + DAY)
    entry: dict[str, Json] = {
        "event": "attempt",
        "checkpoint": "a",
        "pid": os.getpid(),
        "pid_start": process.started(os.getpid()),
        "host_boot": process.host_boot(),
    }
    Ledger(state).append(entry)
    assert run(state, tmp_path / "local") == {"a": "running"}


def test_without_any_lock_to_be_had_nothing_goes(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    make(state, tmp_path / "local", "a", age=UNUSED_SECONDS + DAY)
    monkeypatch.setattr(fcntl, "flock", none)
    assert run(state, tmp_path / "local") == {"a": "foreign"}


def test_where_nothing_was_compiled_there_is_nothing_to_do(state: Path, tmp_path: Path) -> None:
    assert run(state, tmp_path) == {}
    (state / "caches").mkdir()
    (state / "caches" / "somebody's").mkdir()
    assert run(state, tmp_path) == {}
