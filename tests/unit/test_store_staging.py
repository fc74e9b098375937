from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import fill, make_checkpoint, make_key
from store_contract import deep_verify, left_over

from entrypoint.errors import SpaceError, StagingError
from entrypoint.store import order, publish
from entrypoint.store import sweep as sweeps
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.staging import begin, join
from entrypoint.store.sweep import orphaned, sweep, teed


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir()
    return DirectoryStore(tmp_path / "store")


def test_several_processes_build_in_one_directory(store: DirectoryStore) -> None:
    with store.stage("tiny") as owner:
        with join(owner.path) as rank:
            manifest = fill(rank, make_key())
        owner.commit(manifest)
    deep_verify(store, manifest.name)


def test_nobody_joins_what_another_user_has_begun(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.stage("tiny") as owner:
        stranger = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: stranger)
        with pytest.raises(StagingError, match=f"began it, and this is uid {stranger}"):
            join(owner.path)


def test_a_disowned_directory_is_committed_by_who_joined_it(store: DirectoryStore) -> None:
    with store.stage("tiny") as owner:
        owner.disown()
    assert left_over(store) == [owner.path.name]
    with join(owner.path) as rank:
        manifest = fill(rank, make_key())
        rank.commit(manifest)
    deep_verify(store, manifest.name)
    assert left_over(store) == []


def test_what_one_builder_gives_up_is_gone_for_all(store: DirectoryStore) -> None:
    with store.stage("tiny") as owner:
        owner.disown()
    with join(owner.path) as first, join(owner.path) as second:
        manifest = fill(first, make_key())
        assert second.give_up()
        assert not first.give_up()
        with pytest.raises(StagingError):
            first.commit(manifest)
    assert store.names() == []
    assert left_over(store) == []
    assert [*(store.root / ".trash").iterdir()] == []


def test_joining_what_was_swept_is_said(store: DirectoryStore) -> None:
    with pytest.raises(StagingError, match="gone"):
        join(store.root / ".staging" / "gone")


def test_a_file_is_created_once(store: DirectoryStore) -> None:
    with store.stage("tiny") as staged:
        staged.write_file("a", b"1")
        with pytest.raises(StagingError, match="exists"):
            staged.write_file("a", b"2")
        (staged.path / "link").symlink_to("/tmp/planted")  # noqa: S108 - never opened
        with pytest.raises(StagingError):
            staged.write_file("link", b"3")


def test_a_long_name_still_fits(store: DirectoryStore) -> None:
    manifest = make_checkpoint(store.root, name="n" * 250)
    assert manifest.name == "n" * 250


def test_the_builders_notes_are_dropped(store: DirectoryStore) -> None:
    with store.stage("tiny") as staged:
        manifest = fill(staged, make_key())
        staged.write_file(".note", b"to the other ranks")
        result = staged.commit(manifest)
    assert not [p for p in store.path(result.name).iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_with_numbers(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with store.stage("tiny") as staged:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(SpaceError, match=r"\d+ bytes free"):
            staged.write_file("a", b"1")


def test_an_error_of_the_commit_publishes_nothing(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync and rename of the commit fails once; a name listed after that is complete."""
    calls = 0
    for failing in range(1, 100):
        calls = 0

        def sometimes(descriptor: int, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.EIO, "injected")

        with store.stage("tiny") as staged:
            manifest = fill(staged, make_key())
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", sometimes)
                try:
                    staged.commit(manifest)
                except StagingError:
                    pass
                else:
                    assert calls < failing
                    break
        for name in store.names():
            # Only the last fsync, of the root, comes after the rename.
            deep_verify(store, name)
            store.retire(name)
    assert calls > 10
    assert len(store.names()) == 1
    deep_verify(store, store.names()[0])


def test_a_sweep_spares_the_living_and_the_young(store: DirectoryStore) -> None:
    with store.stage("living") as living:
        fill(living, make_key())
        with store.stage("young") as young:
            young.disown()
        assert sweep(store.root, 3600) == []
        assert sweep(store.root, -3600) == [young.path.name]
        assert left_over(store) == [living.path.name]


def test_a_sweep_goes_by_the_newest_file(store: DirectoryStore) -> None:
    with store.stage("tiny") as staged:
        fill(staged, make_key())
        staged.disown()
    hour_ago = time.time() - 3600
    for path in [*staged.path.rglob("*"), staged.path]:
        os.utime(path, (hour_ago, hour_ago))
    os.utime(staged.path / "templates" / "chat.jinja")
    assert sweep(store.root, 60) == []
    os.utime(staged.path / "templates" / "chat.jinja", (hour_ago, hour_ago))
    assert sweep(store.root, 60) == [staged.path.name]
    assert left_over(store) == []


def test_a_sweep_spares_a_builder_in_another_process(store: DirectoryStore) -> None:
    program = (
        "import sys, time; from pathlib import Path; from entrypoint.store.staging import begin\n"
        "staged = begin(Path(sys.argv[1]), 'tiny'); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, store.root], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert sweep(store.root, -1) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len(sweep(store.root, -1)) == 1


def test_a_tee_lives_with_its_lock_and_what_goes_meanwhile_is_neither_living_nor_left(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.stage("tiny") as staged:
        order.leave(staged, {"subject": "s"})
        assert teed(store.root, "another") == ([], [])
        assert teed(store.root, "s") == ([staged.path], [])
        staged.disown()
    assert teed(store.root, "s") == ([], [staged.path])
    real = sweeps._is_free

    def vanishing(path: Path, *, without_locks: bool) -> bool:
        staged.give_up()
        return real(path, without_locks=without_locks)

    monkeypatch.setattr(sweeps, "_is_free", vanishing)
    assert teed(store.root, "s") == ([], [])


def test_an_order_that_nobody_could_read_is_not_left(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MAX_BYTES", 10)
    with store.stage("tiny") as staged:
        with pytest.raises(StagingError, match="expected at most 10"):
            order.leave(staged, {"subject": "long"})
        assert os.listdir(staged.path) == []


def test_what_a_builder_who_died_has_left_is_an_orphan_however_young(
    store: DirectoryStore,
) -> None:
    with store.stage("living") as living:
        assert orphaned(store.root) == []
        living.disown()
    # Our own pid: a container's first process is 1 each time, and has built nothing yet.
    assert orphaned(store.root) == [living.path]
    unique = living.path.name.rpartition(".")[2]
    host = living.path.name.split(".")[1]
    for name, is_orphan in (
        (f"a.b-1.5.{host}.{1 << 22}.{unique}", True),
        (f"a.{host}.{os.getppid()}.{unique}", False),
        (f"a.elsewhere.{1 << 22}.{unique}", False),
        ("odd", False),
        (f".{host}.x.y", False),
    ):
        path = living.path.rename(living.path.with_name(name))
        assert orphaned(store.root) == ([path] if is_orphan else []), name
        path.rename(living.path)


def test_where_there_are_no_locks_the_grace_alone_decides(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with store.stage("tiny") as staged:
        assert sweep(store.root, 60) == []
        assert orphaned(store.root) == []
        assert sweep(store.root, -60) == [staged.path.name]
        with pytest.raises(StagingError):
            staged.write_file("a", b"")


def test_a_sweep_empties_the_trash_as_far_as_it_goes(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [make_checkpoint(store.root, seed=seed).name for seed in range(2)]
    for name in names:
        store.retire(name)
    unlink = os.unlink

    def busy(path: str, *, dir_fd: int | None = None) -> None:
        if path == "index.json":
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        assert sweep(store.root, 60) == []
    assert len(sweep(store.root, 60)) == 2
    assert list((store.root / ".trash").iterdir()) == []


def test_a_sweep_follows_no_link_in_the_place_of_what_it_sweeps(
    store: DirectoryStore, tmp_path: Path
) -> None:
    (tmp_path / "precious" / "old").mkdir(parents=True)
    for name in (".staging", ".trash"):
        (store.root / name).symlink_to(tmp_path / "precious")
    assert sweep(store.root, -60) == []
    assert (tmp_path / "precious" / "old").is_dir()


def test_a_sweep_of_a_store_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "nowhere", 0) == []


def _no_flock(*_: object) -> None:
    """What some network file systems do."""


def _commit_once(root: Path, seed: int, start: object, results: object) -> None:
    fcntl.flock = _no_flock
    with begin(root, "tiny") as staged:
        manifest = fill(staged, make_key(), seed=seed)
        start.wait()  # type: ignore[attr-defined]
        result = staged.commit(manifest)
    results.put((seed, result.name, result.outcome))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seeds", [1, 16], ids=["equal bytes", "other bytes each"])
@pytest.mark.parametrize("damaged", [False, True], ids=["on nothing", "on a damaged one"])
def test_sixteen_commit_one_name_at_once_and_locks_do_nothing(
    store: DirectoryStore, seeds: int, damaged: bool
) -> None:
    if damaged:
        manifest = make_checkpoint(store.root)
        (store.path(manifest.name) / "index.json").unlink()
    fork = multiprocessing.get_context("fork")
    start, results = fork.Barrier(16), fork.Queue()
    workers = [
        fork.Process(target=_commit_once, args=(store.root, n % seeds, start, results), daemon=True)
        for n in range(16)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    names = {name for _, name, _ in answers}
    assert set(store.names()) == names
    assert len(names) == seeds
    for name in names:
        deep_verify(store, name)
    committed = [name for _, name, outcome in answers if outcome == "committed"]
    # On a damaged one, two may retire it in turn: the name is given again, to equal bytes.
    assert set(committed) == names
    assert damaged or len(committed) == seeds
    assert left_over(store) == []


def test_giving_up_on_a_name_that_flickers(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_rename", lambda *_: False)
    with store.stage("tiny") as staged:
        manifest = fill(staged, make_key())
        with pytest.raises(StagingError, match="without end"):
            staged.commit(manifest)
