"""What the sidecar decides, and how its loop goes on: from plain values, without a process."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_key

from entrypoint.checkpoint.digest import Json
from entrypoint.config import Prove, resolve
from entrypoint.errors import Interrupted, StoreError
from entrypoint.log import Log
from entrypoint.sidecar import scrub
from entrypoint.sidecar.choice import (
    Fetch,
    Past,
    Repair,
    to_fetch,
    to_publish,
    to_repair,
    to_scrub,
)
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.history import booted, counted
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.loop import Job, next_due, patience
from entrypoint.sidecar.node import Node
from entrypoint.sidecar.view import (
    COMPLETE,
    DAMAGED,
    REJECTED,
    UNREADABLE,
    Manifests,
    Seen,
    see_local,
)
from entrypoint.state.attempts import Use
from entrypoint.state.awaited import Awaited
from entrypoint.state.memory import Memory
from entrypoint.state.proofs import Proofs
from entrypoint.store.directory import DirectoryStore

HOST = "here"


def seen(name: str, created: float = 1.0, **facts: Any) -> Seen:
    """Return a sound checkpoint of one family that boots of this node have served."""
    base = Seen(
        *(name, "complete", ""),
        *(f"content of {name}", f"digest of {name}", f"key of {name}"),
        family="f",
        made_by=("0.32", 2),
        created=created,
        host=HOST,
        ranks=(0, 1),
        world=2,
        served=True,
    )
    return base._replace(**facts)


def wanted(name: str, ranks: tuple[int, ...] = (0, 1)) -> Fetch:
    return Fetch(name, f"content of {name}", ranks)


OLD, NEW = seen("old", 1.0), seen("new", 2.0)


@pytest.mark.parametrize(
    ("local", "shared", "expected"),
    [
        pytest.param([OLD], [OLD, NEW], [wanted("new")], id="a newer one"),
        pytest.param([OLD], [OLD], [], id="the one that is here"),
        pytest.param([NEW], [OLD], [], id="an older one"),
        pytest.param([OLD, NEW], [NEW], [], id="the newer one is here, and never was served"),
        pytest.param([], [NEW], [], id="nothing is served here"),
        pytest.param([OLD._replace(served=False)], [NEW], [], id="what is here was never served"),
        pytest.param([OLD], [NEW._replace(family="g")], [], id="another model or layout"),
        pytest.param([OLD], [NEW._replace(state=REJECTED)], [], id="rejected"),
        pytest.param([OLD], [Seen("odd", UNREADABLE)], [], id="unreadable there"),
        pytest.param([Seen("odd", UNREADABLE)], [NEW], [], id="unreadable here"),
        pytest.param(
            [OLD], [NEW, seen("newest", 3.0)], [wanted("newest")], id="of two, the newest"
        ),
        pytest.param(
            [OLD],
            [NEW, seen("newest", 3.0, state=REJECTED)],
            [wanted("new")],
            id="of two, the newest that may be served",
        ),
        pytest.param(
            [OLD._replace(ranks=(1,))],
            [NEW],
            [wanted("new", (1,))],
            id="for the ranks of this node",
        ),
        pytest.param(
            [OLD, NEW._replace(state=DAMAGED)], [NEW], [], id="damaged here, so it is repaired"
        ),
        pytest.param(
            [OLD, NEW._replace(state=DAMAGED)],
            [NEW, seen("newest", 3.0)],
            [wanted("newest")],
            id="damaged here, and there is a newer one",
        ),
        pytest.param(
            [OLD, NEW._replace(state=UNREADABLE)], [NEW], [], id="here, and could not be read now"
        ),
        pytest.param([OLD, NEW._replace(state=REJECTED)], [NEW], [], id="here, and rejected"),
        pytest.param([OLD], [seen("done", 2.0)], [], id="fetched before, and gone since"),
        pytest.param(
            [OLD._replace(ranks=(1,)), seen("torn", 1.5, state=DAMAGED, ranks=())],
            [NEW],
            [wanted("new", (1,))],
            id="of which ranks one is here is torn: those of the one before",
        ),
        pytest.param([OLD._replace(ranks=())], [NEW], [], id="nobody knows which ranks"),
        pytest.param(
            [OLD], [NEW._replace(made_by=("0.33", 2))], [], id="never served by that vLLM"
        ),
        pytest.param([OLD], [NEW._replace(made_by=("0.32", 3))], [], id="in another format"),
        pytest.param(
            [OLD, seen("other", family="g", made_by=("0.33", 2))],
            [NEW._replace(made_by=("0.33", 2))],
            [wanted("new")],
            id="another model was served by that vLLM",
        ),
        pytest.param(
            [OLD, seen("other", family="g")],
            [NEW, seen("another", 3.0, family="g")],
            [wanted("another"), wanted("new")],
            id="of each family, the newest first",
        ),
    ],
)
def test_what_is_fetched(local: list[Seen], shared: list[Seen], expected: list[Fetch]) -> None:
    assert to_fetch(local, shared, {"content of done"}, "auto") == expected


@pytest.mark.parametrize(
    ("here", "there", "is_repaired"),
    [
        pytest.param(NEW, NEW, False, id="sound"),
        pytest.param(NEW._replace(state=DAMAGED), NEW, True, id="damaged"),
        pytest.param(NEW._replace(state=DAMAGED, running=True), NEW, True, id="and in use"),
        pytest.param(NEW._replace(state=DAMAGED, served=False), NEW, True, id="never served"),
        pytest.param(
            NEW._replace(state=DAMAGED), NEW._replace(name="new-g2"), True, id="another name there"
        ),
        pytest.param(NEW._replace(state=DAMAGED), OLD, False, id="not there"),
        pytest.param(
            NEW._replace(state=DAMAGED), NEW._replace(state=REJECTED), False, id="rejected"
        ),
        pytest.param(
            NEW._replace(state=DAMAGED, ranks=()), NEW, False, id="nobody knows which ranks"
        ),
        pytest.param(Seen("odd", UNREADABLE), Seen("odd", UNREADABLE), False, id="unreadable"),
        pytest.param(
            *(seen("done", state=DAMAGED), seen("done")), False, id="repaired a moment ago"
        ),
        pytest.param(
            *(seen("long ago", state=DAMAGED), seen("long ago")), True, id="repaired long ago"
        ),
    ],
)
def test_what_is_repaired(here: Seen, there: Seen, is_repaired: bool) -> None:
    past = Past({"content of done": 95.0, "content of long ago": 90.0}, now=100.0, interval=10.0)
    found = to_repair([here], [there], past)
    assert found == [Repair(here.name, here.content, there.name)] * is_repaired


@pytest.mark.parametrize(
    ("served", "new", "prove", "is_fetched"),
    [
        (False, False, "auto", True),
        (True, False, "auto", False),
        (True, True, "auto", True),
        (False, False, "always", False),
        (True, True, "always", True),
        (True, False, "never", True),
    ],
)
def test_what_no_boot_would_serve_unproved_is_fetched_with_a_proof(
    served: bool, new: bool, prove: Prove, is_fetched: bool
) -> None:
    local, shared = [OLD._replace(proved=served)], [NEW._replace(proved=new)]
    assert to_fetch(local, shared, (), prove) == [wanted("new")] * is_fetched


@pytest.mark.parametrize(
    ("local", "shared", "expected"),
    [
        pytest.param([OLD._replace(proved=True, sealed=True)], [], ["old"], id="proved"),
        pytest.param([OLD._replace(loaded=True)], [], ["old"], id="loaded without a proof"),
        pytest.param([OLD], [], [], id="neither"),
        pytest.param([OLD._replace(proved=True, loaded=True)], [], [], id="proved here only"),
        pytest.param([OLD._replace(proved=True, sealed=True)], [OLD], [], id="it is there"),
        pytest.param(
            [OLD._replace(proved=True, sealed=True)],
            [NEW._replace(key=OLD.key)],
            [],
            id="another save of its key is there",
        ),
        pytest.param(
            [OLD._replace(proved=True, sealed=True)],
            [NEW._replace(key=OLD.key, state=REJECTED)],
            ["old"],
            id="the other save of its key was rejected",
        ),
        pytest.param(
            [OLD._replace(proved=True, sealed=True, host="there")], [], [], id="saved elsewhere"
        ),
        pytest.param(
            [OLD._replace(proved=True, sealed=True, ranks=(0,))], [], [], id="some ranks only"
        ),
        pytest.param([OLD._replace(proved=True, sealed=True, state=DAMAGED)], [], [], id="damaged"),
        pytest.param([seen("done", proved=True, sealed=True)], [], [], id="published before"),
        pytest.param(
            [OLD._replace(proved=True, sealed=True), NEW._replace(proved=True, sealed=True)],
            [],
            ["new"],
            id="the newest",
        ),
        pytest.param(
            [
                OLD._replace(proved=True, sealed=True),
                NEW._replace(proved=True, sealed=True, state=DAMAGED),
            ],
            [],
            ["old"],
            id="the newest that is sound",
        ),
    ],
)
def test_what_is_published(local: list[Seen], shared: list[Seen], expected: list[str]) -> None:
    found = to_publish(local, shared, HOST, {"content of done"})
    assert [each.name for each in found] == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, "old"),
        ({"old": 50.0}, "new"),
        ({"old": 50.0, "new": 40.0}, "new"),
        ({"old": 91.0, "new": 95.0}, None),
        ({"old": 90.0, "new": 95.0}, "old"),
    ],
)
def test_who_was_read_longest_ago_is_read_next(
    times: dict[str, float], expected: str | None
) -> None:
    scrubbed = {f"digest of {name}": time for name, time in times.items()}
    found = to_scrub([OLD, NEW, Seen("odd", UNREADABLE)], scrubbed, now=100.0, interval=10.0)
    assert (found and found.name) == expected


def test_what_is_known_to_be_damaged_is_not_read_again() -> None:
    assert to_scrub([OLD._replace(state=DAMAGED)], {}, now=100.0, interval=0.0) is None


def test_the_first_of_those_that_are_due_has_its_turn() -> None:
    assert next_due({"a": 2.0, "b": 1.0, "c": 1.0, "never": math.inf}) == "b"


def test_failures_are_waited_for_ever_longer_up_to_a_bound() -> None:
    rests = [patience(60, n, 0.0) for n in (1, 2, 3, 10, 11, 100_000)]
    assert rests == [62, 64, 68, 1084, 1084, 1084]


def test_hosts_that_failed_together_do_not_come_back_together() -> None:
    assert [patience(60, 3, chance) for chance in (0.0, 0.5, 1.0)] == [68, 66, 64]


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
    Proofs(state).add(manifest.content, {"items": 1})
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
