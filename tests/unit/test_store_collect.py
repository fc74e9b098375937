"""Collecting and evicting in a real directory."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from blackbox.harness import snapshot
from checkpoints import make_checkpoint, make_key
from releases import DAY, add, serve, three
from store_contract import deep_verify, left_over

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import OwnershipError, StoreError
from entrypoint.state.ledger import Ledger
from entrypoint.state.rejections import Rejections
from entrypoint.store import lock, pins, sweep
from entrypoint.store.collect import Collection, collect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.retention import Rules

RULES = Rules(grace=3600)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def releases(store: DirectoryStore) -> list[Manifest]:
    """Three releases of one deployment, oldest first."""
    return three(store)


def run(store: DirectoryStore, state: Path, *, dry_run: bool = False) -> Collection:
    return collect(store, state, RULES, dry_run=dry_run)


def reasons(done: Collection) -> dict[str, str]:
    return {verdict.name: verdict.reason for verdict in done.verdicts}


def test_older_releases_go_and_their_bytes_with_them(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    done = run(store, state)
    assert reasons(done) == {"of-0.32": "newest", "of-0.31": "superseded", "of-0.30": "superseded"}
    assert [v.size for v in done.verdicts] == [m.size for m in reversed(releases)]
    assert store.names() == ["of-0.32"]
    deep_verify(store, "of-0.32")
    assert os.listdir(store.root / ".trash") == []


def test_a_dry_run_says_the_same_and_changes_nothing(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    store.retire(add(store, "0.1", days=1).name)
    with store.stage("killed") as staged:
        staged.disown()
    then = time.time() - DAY
    os.utime(staged.path, (then, then))
    before = snapshot(store.root)
    would = run(store, state, dry_run=True)
    assert snapshot(store.root) == before
    assert len(would.trash) == 1
    done = run(store, state)
    assert (done.verdicts, done.swept) == (would.verdicts, would.swept)
    assert (done.swept, done.trash) == ((staged.path.name,), ())
    assert left_over(store) == []


def test_a_pin_holds_until_it_is_taken_back(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    pins.pin(store.root, "of-0.30", store.dir_mode)
    pins.pin(store.root, "of-0.30", store.dir_mode)
    assert reasons(run(store, state))["of-0.30"] == "pinned"
    assert "of-0.30" in store.names()
    assert pins.unpin(store.root, "of-0.30")
    assert not pins.unpin(store.root, "of-0.30")
    run(store, state)
    assert store.names() == ["of-0.32"]


def test_where_pins_cannot_be_read_nothing_goes(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    (store.root / ".pins").write_text("not a directory")
    with pytest.raises(StoreError, match="pins"):
        run(store, state)
    with pytest.raises(OwnershipError):
        pins.pin(store.root, "of-0.30", store.dir_mode)
    assert len(store.names()) == 3


def test_what_a_server_holds_stays(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    held = lock.hold_manifest(store.path("of-0.30"), releases[0].digest)
    assert reasons(run(store, state))["of-0.30"] == "running"
    deep_verify(store, "of-0.30")
    os.close(held)
    run(store, state)
    assert store.names() == ["of-0.32"]


def test_where_locks_lie_a_process_of_the_ledger_is_enough(
    store: DirectoryStore, state: Path, releases: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    serve(state, releases[0])
    serve(state, releases[1], pid_start=1)
    done = run(store, state)
    assert reasons(done)["of-0.30"] == "running"
    assert str(os.getpid()) in done.verdicts[2].text
    # The pid is another process's by now, and this host's boot another one.
    assert reasons(done)["of-0.31"] == "superseded"
    serve(state, releases[2], host_boot="before the power loss")
    assert set(store.names()) == {"of-0.32", "of-0.30"}


def test_a_server_that_comes_between_decision_and_act_is_seen(
    store: DirectoryStore, state: Path, releases: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    abandoned = sweep.abandoned

    def late(root: Path, grace: float) -> list[Path]:
        serve(state, releases[0])
        pins.pin(store.root, "of-0.31", store.dir_mode)
        return abandoned(root, grace)

    monkeypatch.setattr(sweep, "abandoned", late)
    assert reasons(run(store, state)) == {
        "of-0.32": "newest",
        "of-0.31": "pinned",
        "of-0.30": "running",
    }
    assert len(store.names()) == 3


def test_where_there_are_no_locks_nothing_goes(
    store: DirectoryStore, state: Path, releases: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    done = run(store, state)
    assert set(reasons(done).values()) == {"foreign"}
    assert "No locks available" in done.verdicts[0].text
    assert len(store.names()) == 3


def test_who_serves_is_known_when_the_ledger_has_just_begun_a_new_file(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    serve(state, releases[0])
    (state / "ledger.jsonl").rename(state / "ledger.1.jsonl")
    assert reasons(run(store, state))[releases[0].name] == "running"


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.1.jsonl"])
def test_a_ledger_that_cannot_be_read_is_no_silence_about_servers(
    name: str, store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    # For root as for others.
    (state / name).mkdir(parents=True)
    with pytest.raises(StoreError, match="ledger"):
        run(store, state)


def test_the_last_that_vllm_loaded_stands_by_for_the_newest(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    serve(state, releases[1], pid=1 << 21)
    Ledger(state).append({"boot": "b", "event": "loaded"})
    assert reasons(run(store, state))["of-0.31"] == "loaded"
    serve(state, releases[2], boot="c", pid=1 << 21)
    Ledger(state).append({"boot": "c", "event": "loaded"})
    assert reasons(run(store, state)) == {"of-0.32": "newest", "of-0.31": "superseded"}


def test_the_newest_that_is_damaged_or_rejected_does_not_cost_the_one_before(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    (store.path("of-0.32") / "index.json").unlink()
    assert Rejections(state).add(releases[1].content, "quarantined", "three boots died")
    assert reasons(run(store, state)) == {
        "of-0.32": "damaged",
        "of-0.31": "rejected",
        "of-0.30": "newest",
    }
    assert store.names() == ["of-0.31", "of-0.30"]


def test_what_does_not_fit_other_words_is_sound_where_vllm_has_loaded_it(
    store: DirectoryStore, state: Path, releases: list[Manifest]
) -> None:
    newest = releases[2]
    serve(state, newest, pid=1 << 21)
    assert Rejections(state).add(newest.content, "unfit", "other shapes", "other words")
    assert reasons(run(store, state, dry_run=True))[newest.name] == "rejected"
    Ledger(state).append({"boot": "b", "event": "loaded"})
    assert reasons(run(store, state))[newest.name] == "newest"


def test_what_only_some_ranks_hold_is_complete_for_them(store: DirectoryStore, state: Path) -> None:
    part = add(store, "0.40", days=3, ranks=[1])
    done = run(store, state)
    assert reasons(done) == {part.name: "newest"}
    assert done.verdicts[0].size == sum(e.size for e in part.files_for([1]))


def test_other_peoples_files_are_never_touched(
    store: DirectoryStore, state: Path, releases: list[Manifest], tmp_path: Path
) -> None:
    (store.root / "notes.txt").write_text("mine")
    (store.root / "models").mkdir()
    (store.root / "models" / "model.safetensors").write_text("mine")
    (store.root / "odd").mkdir()
    (store.root / "odd" / "manifest.json").write_text('{"schema": 99}')
    outside = tmp_path / "outside"
    make_checkpoint(outside, name="of-0.29", key=make_key(vllm="0.29"))
    (store.root / "of-0.29").symlink_to(outside / "of-0.29")
    (store.path("of-0.30") / "my-notes.txt").write_text("mine")
    then = time.time() - 40 * DAY
    for path in store.root.rglob("*"):
        os.utime(path, (then, then))
    before = {n: snapshot(store.root / n) for n in ("notes.txt", "models", "odd", "of-0.30")}
    before["outside"] = snapshot(outside)
    done = run(store, state)
    assert reasons(done)["odd"] == "foreign"
    assert reasons(done)["of-0.30"] == "foreign"
    assert "my-notes.txt" in next(v.text for v in done.verdicts if v.name == "of-0.30")
    after = {name: snapshot(store.root / name) for name in before if name != "outside"}
    assert before == after | {"outside": snapshot(outside)}
    assert (store.root / "of-0.29").is_symlink()


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE])
def test_busy_is_no_error_and_the_next_run_tries_again(
    store: DirectoryStore,
    state: Path,
    releases: list[Manifest],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """NFS keeps the name of a file that somebody has open."""
    unlink = os.unlink

    def busy(path: Any, *, dir_fd: int | None = None) -> None:
        if path == "index.json":
            raise OSError(number, os.strerror(number))
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        done = run(store, state)
        assert [v.is_collected for v in done.verdicts] == [False, True, True]
        assert len(done.trash) == 2
        assert run(store, state).trash == done.trash
    assert store.names() == ["of-0.32"]
    assert run(store, state).trash == ()


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.EBUSY, "busy"), (errno.EACCES, "denied"), (errno.EROFS, "denied")]
)
def test_what_cannot_be_moved_is_said_and_stays(
    store: DirectoryStore,
    state: Path,
    releases: list[Manifest],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    reason: str,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    assert reasons(run(store, state))["of-0.30"] == reason
    assert len(store.names()) == 3
    deep_verify(store, "of-0.30")


def test_staging_that_cannot_be_moved_is_not_said_to_be_gone(
    store: DirectoryStore, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = time.time() - DAY
    for name in ("one", "other"):
        with store.stage(name) as staged:
            staged.disown()
        os.utime(staged.path, (then, then))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith("one."):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    done = run(store, state)
    (stays,) = left_over(store)
    assert stays.startswith("one.")
    assert done.stayed == ((stays, "denied", f"{store.root}/.staging/{stays}: Permission denied"),)
    (swept,) = done.swept
    assert swept.startswith("other.")


def test_two_collectors_at_once_are_no_error(
    store: DirectoryStore, state: Path, releases: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = sweep.abandoned

    def late(root: Path, grace: float) -> list[Path]:
        monkeypatch.undo()
        collect(store, state, RULES, dry_run=False)
        return abandoned(root, grace)

    monkeypatch.setattr(sweep, "abandoned", late)
    assert reasons(run(store, state)) == {"of-0.32": "newest", "of-0.31": "gone", "of-0.30": "gone"}
