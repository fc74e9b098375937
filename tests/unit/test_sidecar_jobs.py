"""How jobs of the sidecar go on, what they have in view, a scrub's pace: without a process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_key, proof_of

from entrypoint.checkpoint.digest import Json
from entrypoint.config import resolve
from entrypoint.errors import Interrupted, StoreError
from entrypoint.log import Log
from entrypoint.sidecar import scrub
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.history import booted, counted
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.loop import Job
from entrypoint.sidecar.node import Node, now
from entrypoint.sidecar.view import (
    COMPLETE,
    REJECTED,
    Manifests,
    see_local,
)
from entrypoint.state.attempts import Use
from entrypoint.state.awaited import Awaited
from entrypoint.state.memory import Memory
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections
from entrypoint.store import directory, distant
from entrypoint.store.directory import DirectoryStore

YEAR = 365 * 86400.0


@pytest.fixture
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.sidecar.loop.random.random", lambda: 0.0)


def test_a_job_is_done_piece_by_piece_and_then_rests_for_its_interval() -> None:
    job = Job("j", 60, lambda: iter([0.5, 0.25]))
    assert [job.turn(print) for _ in range(4)] == [0.5, 0.25, 60, 0.5]
    assert (job.record.runs, job.record.failures) == (2, 0)
    assert job.record.began
    assert job.record.succeeded


def test_a_failure_is_one_line_and_what_comes_after_it_is_a_new_run(no_chance: None) -> None:
    said: list[str] = []

    def work() -> Iterator[float]:
        yield 0.5
        raise OSError(errno.EIO, "Input/output error") if said else StoreError("gone")

    job = Job("j", 60, work)
    assert [job.turn(said.append) for _ in range(4)] == [0.5, 62, 0.5, 64]
    assert said == [
        "j: store.unreachable: gone; the next try is in 62 s",
        "j: [Errno 5] Input/output error; the next try is in 64 s",
    ]
    assert job.record[:4] == (2, 2, 2, 0.0)
    assert (job.record.error, job.record.began) == ("[Errno 5] Input/output error", 0.0)


def test_a_success_ends_a_row_of_failures(no_chance: None) -> None:
    outcomes = iter([StoreError("gone"), None])

    def work() -> tuple[float, ...]:
        if error := next(outcomes):
            raise error
        return ()

    job = Job("j", 60, work)
    assert [job.turn(lambda _: None) for _ in range(2)] == [62, 60]
    assert (job.record.in_row, job.record.failures, job.record.error) == (0, 1, "")


@pytest.mark.parametrize("error", [Interrupted(15), ValueError("a bug")])
def test_signals_and_bugs_are_no_failures_of_a_job(error: BaseException) -> None:
    def work() -> tuple[float, ...]:
        raise error

    with pytest.raises(type(error)):
        Job("j", 60, work).turn(print)


def attempt(boot: str, action: str, reason: str, *after: str) -> dict[str, Json]:
    return {
        "boot": boot,
        "event": "attempt",
        "action": action,
        "reason": reason,
        "after": [*after],
    }


def test_boots_are_counted_by_tier_and_outcome_and_refusals_by_reason() -> None:
    entries: list[dict[str, Json]] = [
        {"boot": "lost", "event": "healthy"},
        attempt("1", "reuse", "local.hit"),
        {"boot": "1", "event": "loading"},
        {"boot": "1", "event": "loaded"},
        {"boot": "1", "event": "healthy"},
        attempt("2", "reuse", "local.hit", "copy: shared.hit"),
        {"boot": "2", "event": "loading"},
        attempt("3", "reuse", "local.hit", "copy: shared.hit", "save: shared.damaged"),
        {"boot": "3", "event": "loading"},
        {"boot": "3", "event": "fell-back"},
        {"boot": "3", "event": "healthy"},
        attempt("4", "serve-source", "space.short"),
        attempt("5", "refuse", "space.short"),
        {"event": "attempt", "boot": "6", "action": ["odd"], "after": "odd"},
    ]
    odd_time = attempt("6", "reuse", "local.hit") | {"time": 10**400}
    assert [boot.time for boot in booted([odd_time, odd_time | {"boot": "7", "time": 5}])] == [0, 5]
    boots, refusals = counted(booted(entries))
    assert boots == {
        ("local", "healthy"): 1,
        ("shared", "loading"): 1,
        ("saved", "fell-back"): 1,
        ("source", "started"): 1,
        ("none", "refused"): 1,
        ("none", "started"): 1,
    }
    assert refusals == {"space.short": 2}


def test_a_manifest_is_read_once_as_long_as_its_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reads = DirectoryStore(tmp_path), list[str]()
    read = store.read_manifest

    def noted(name: str) -> bytes:
        reads.append(name)
        return read(name)

    monkeypatch.setattr(store, "read_manifest", noted)
    for name in ("a", "b"):
        make_checkpoint(tmp_path, key=make_key(vllm=name), name=name)
    manifests = Manifests(store)
    assert {name for name, _ in manifests.all()} == {"a", "b"}
    (tmp_path / "b" / "manifest.json").write_bytes(b"{}")
    found = dict(manifests.all())
    assert isinstance(found["b"], str)
    assert sorted(reads) == ["a", "b", "b"]
    store.retire("a")
    assert [name for name, _ in manifests.all()] == ["b"]


def test_who_cannot_tell_whether_somebody_uses_it_takes_it_for_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    make_checkpoint(tmp_path)
    store = DirectoryStore(tmp_path)
    manifests, memory = Manifests(store), Memory(tmp_path)
    assert [each.running for each in see_local(store, manifests, memory, {}).seen] == [False]
    monkeypatch.setattr("entrypoint.store.lock.fcntl.flock", has_no_locks)
    assert [each.running for each in see_local(store, manifests, memory, {}).seen] == [True]


def test_who_waits_for_its_proof_has_served_nothing_yet(tmp_path: Path) -> None:
    manifest, state = make_checkpoint(tmp_path / "store"), tmp_path / "state"
    store, memory = DirectoryStore(tmp_path / "store"), Memory(state)
    used = {manifest.digest: Use(served=1.0, loaded=True)}

    def found() -> tuple[bool, bool, bool]:
        [one] = see_local(store, Manifests(store), memory, used).seen
        return one.served, one.loaded, one.proved

    assert found() == (True, True, False)
    Awaited(state).add(manifest.content, dict.fromkeys(manifest.layout.ranks))
    assert found() == (False, False, False)
    Proofs(state).add(manifest, proof_of(manifest))
    assert found() == (True, True, True)


def test_what_is_left_to_others_is_left_ever_longer_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, no_chance: None
) -> None:
    times = iter([0.0, 1.9, 2.0, 10.0, 13.9, 14.0, 20.0, 21.9, 22.0])
    monkeypatch.setattr("entrypoint.sidecar.later.time.monotonic", lambda: next(times))
    later = Later()
    assert later.put_off("x") == 2.0
    assert [later.has_come("x"), later.has_come("x")] == [False, True]
    assert later.put_off("x") == 4.0
    assert [later.has_come("x"), later.has_come("x")] == [False, True]
    later.forget("x")
    assert later.put_off("x") == 2.0
    assert [later.has_come("x"), later.has_come("x")] == [False, True]


def test_what_fails_is_put_off_and_keeps_no_other_from_its_turn(no_chance: None) -> None:
    later, done = Later(), list[str]()

    def do(name: str) -> None:
        done.append(name)
        if name == "b":
            raise StoreError(f"{name} fails")

    for _ in range(2):
        with pytest.raises(StoreError, match="b fails"):
            list(in_turn(["a", "b", "c"], str, do, later))
        # Now it rests, and so nothing fails.
        list(in_turn(["a", "b", "c"], str, do, later))
        assert done == ["a", "b", "c", "a", "c"]
        done.clear()
        later.forget_all()


def test_what_was_done_is_known_after_a_restart_and_what_was_put_off_is_not(tmp_path: Path) -> None:
    done = Done(Memory(tmp_path), "scrubbed")
    assert done.when("x") == 0.0
    done.note("x", 5.5)
    done.put_off("y", 6.5)
    assert (done.when("x"), done.when("y")) == (5.5, 6.5)
    again = Done(Memory(tmp_path), "scrubbed")
    assert (again.when("x"), again.when("y")) == (5.5, 0.0)
    assert Done(Memory(tmp_path), "prefetched").when("x") == 0.0


def test_what_a_clock_that_was_ahead_has_noted_was_done_but_at_no_time(tmp_path: Path) -> None:
    done = Done(Memory(tmp_path), "scrubbed")
    done.note("x", now() + YEAR)
    for known in (done, Done(Memory(tmp_path), "scrubbed")):
        assert known.when("x") == 0.0
        assert known.ever("x")
    done.note("x", time := now())
    assert done.when("x") == time
    assert not done.ever("y")


def test_a_clock_that_was_ahead_neither_stops_a_scrub_nor_has_it_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(tmp_path / "local")
    flags = {"local_dir": str(tmp_path / "local"), "state_dir": str(tmp_path / "state")}
    node = Node(resolve(flags, {}), {}, Log("sidecar"))
    node.look()
    job = scrub.Scrub(node)
    ahead = now() + YEAR
    with monkeypatch.context() as patched:
        patched.setattr(scrub, "now", lambda: ahead)
        job.ask()
    Done(node.boot.memory, "scrubbed").note(manifest.digest, ahead)
    assert list(job.run())
    assert list(job.run()) == []


def read_through(root: Path, rate: int) -> tuple[list[float], tuple[str, ...]]:
    """Read a checkpoint; return all rests, and what is wrong."""
    store = DirectoryStore(root)
    (name,) = store.names()
    manifest = dict(Manifests(store).all())[name]
    assert not isinstance(manifest, str)
    reading = scrub.read_through(store.path(name), manifest, manifest.layout.ranks, rate)
    rests = []
    while True:
        try:
            rests.append(next(reading))
        except StopIteration as end:
            return rests, end.value


def test_a_scrub_reads_every_byte_no_faster_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.sidecar.scrub.time.monotonic", lambda: 0.0)
    manifest = make_checkpoint(tmp_path)
    rests, wrong = read_through(tmp_path, rate=1000)
    assert wrong == ()
    assert sum(rests) == pytest.approx(manifest.size / 1000)


@pytest.mark.parametrize("direct", [True, False])
def test_a_scrub_finds_a_flipped_bit_whatever_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr("entrypoint.sidecar.scrub.os.O_DIRECT", 0)
    manifest = make_checkpoint(tmp_path)
    path = tmp_path / manifest.name / "model-rank-1-part-0.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    _, wrong = read_through(tmp_path, rate=1 << 40)
    assert wrong == (f"{path.name}: BLAKE3 is not the one in the manifest",)


def test_what_cannot_be_read_now_is_not_damaged_and_does_not_count_as_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    make_checkpoint(tmp_path / "local")
    flags = {"local_dir": str(tmp_path / "local"), "state_dir": str(tmp_path / "state")}
    node = Node(resolve(flags, {}), {}, Log("sidecar"))
    node.look()
    job = scrub.Scrub(node)
    monkeypatch.setattr(scrub, "_read", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*model-rank-0-part-0"):
        list(job.run())
    node.look()
    assert [each.state for each in node.seen("local")] == [COMPLETE]
    assert list(job.run()) == []
    assert node.sight.scrubbed == 0.0


@pytest.mark.parametrize("where", ["_written", "stamp_of", "read_bounded"])
def test_a_shared_store_that_falls_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def hang(*_: object) -> None:
        # In a child alone: all jobs would wait for it.
        assert os.getpid() != me
        time.sleep(1000)

    me = os.getpid()
    for name in ("a", "b"):
        make_checkpoint(tmp_path / "shared", key=make_key(vllm=name), name=name)
    flags = {name: str(tmp_path / name) for name in ("local_dir", "state_dir", "shared")}
    node = Node(resolve(flags, {}), {}, Log("sidecar"))
    monkeypatch.setattr(distant, "LOOK_SECONDS", 0.3)
    with monkeypatch.context() as silent:
        silent.setattr(directory, where, hang)
        with pytest.raises(StoreError, match="did not answer"):
            node.look_far()
    assert node.seen("shared") == ()
    node.look_far()
    assert [each.state for each in node.seen("shared")] == [COMPLETE, COMPLETE]


def test_what_others_words_do_not_fit_is_sound_where_vllm_has_loaded_it(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "store")
    store, memory = DirectoryStore(tmp_path / "store"), Memory(tmp_path / "state")
    assert Rejections(memory.root).add(manifest.content, "unfit", "other shapes", "other words")
    for use, state in ((Use(served=1.0), REJECTED), (Use(served=1.0, loaded=True), COMPLETE)):
        seen = see_local(store, Manifests(store), memory, {manifest.digest: use}).seen
        assert [each.state for each in seen] == [state]
