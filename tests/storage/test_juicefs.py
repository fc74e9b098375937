"""Two mounts of one JuiceFS: two nodes with a shared store, and no notices between them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_driver
from blackbox.harness import House
from checkpoints import make_checkpoint, make_large
from directory_contract import DirectoryContract
from juicefs import Nodes, another_mount, stores
from lease_driver import WHAT, Node, pace
from store_contract import deep_verify, left_over
from store_driver import BIG

from entrypoint.errors import NotFoundError, StoreError
from entrypoint.store import lease, lock, transfer
from entrypoint.store.collect import collect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.retention import Rules
from entrypoint.store.staging import NOTE
from entrypoint.store.sweep import sweep


class TestOnJuiceFS(DirectoryContract):
    @pytest.fixture
    def store(self, nodes: Nodes, tmp_path: Path) -> DirectoryStore:
        return stores(nodes, tmp_path.name)[0]


def test_what_one_node_pushes_another_copies(nodes: Nodes, tmp_path: Path) -> None:
    here, there = stores(nodes, "push")
    local = [tmp_path / "local-1", tmp_path / "local-2"]
    manifest = make_checkpoint(local[0], tensors=BIG)
    store_driver.push(local[0], here.root)
    deadline = time.monotonic() + 10
    while there.names() != [manifest.name]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    deep_verify(there, manifest.name)
    local[1].mkdir()
    store_driver.copy(local[1], there.root)
    deep_verify(DirectoryStore(local[1]), manifest.name)


def test_a_copy_goes_on_while_the_other_node_retires_it(nodes: Nodes, tmp_path: Path) -> None:
    here, there = stores(nodes, "retire")
    manifest = make_checkpoint(here.root, tensors=BIG)
    deep_verify(there, manifest.name)
    (tmp_path / "local").mkdir()
    local = DirectoryStore(tmp_path / "local")
    with local.stage(manifest.name) as staged:
        here.retire(manifest.name)
        # Its node may still know the files' old names; then the copy is whole.
        with contextlib.suppress(NotFoundError, StoreError):
            transfer.copy(there, manifest.name, manifest, manifest.files, staged)
            staged.commit(manifest)
    assert local.names() in ([], [manifest.name])
    for name in local.names():
        deep_verify(local, name)
    assert left_over(local) == []


def test_two_nodes_publish_one_name_and_both_end_complete(nodes: Nodes) -> None:
    here, there = stores(nodes, "race")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = [
        subprocess.Popen(
            [sys.executable, store_driver.__file__, "save", str(store.root), "-"], env=environ
        )
        for store in (here, there) * 4
    ]
    assert [writer.wait(120) for writer in writers] == [0] * 8
    for store in (here, there):
        assert len(store.names()) == 1
        deep_verify(store, store.names()[0])
        assert left_over(store) == []


def test_a_sweep_on_one_node_spares_what_the_other_builds(nodes: Nodes) -> None:
    here, there = stores(nodes, "sweep")
    with here.stage("tiny") as staged:
        staged.write_file("note", b"1")
        deadline = time.monotonic() + 10
        while left_over(there) != [staged.path.name]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert sweep(there.root, 3600) == []
        assert (staged.path / "note").read_bytes() == b"1"


def test_a_copy_that_lives_on_one_node_is_not_taken_by_the_other(nodes: Nodes) -> None:
    here, there = stores(nodes, "adopt")
    with here.stage("tiny", "c" * 64) as ours:
        deadline = time.monotonic() + 10
        while not (there.root / ".staging" / ours.path.name / NOTE).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with there.stage("tiny", "c" * 64) as theirs:
            assert ours.path.exists()
            assert theirs.path.name != ours.path.name
        ours.disown()
    with there.stage("tiny", "c" * 64):
        assert not (there.root / ".staging" / ours.path.name).exists()


def test_gc_on_one_node_spares_what_the_other_serves(nodes: Nodes, tmp_path: Path) -> None:
    here, there = stores(nodes, "gc")
    old, new = (make_checkpoint(here.root, seed=seed) for seed in range(2))
    for number, name in enumerate((old.name, new.name)):
        os.utime(here.path(name) / "manifest.json", (number, number))
    deadline = time.monotonic() + 10
    while there.names() != [new.name, old.name]:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    def reasons() -> list[str]:
        done = collect(there, tmp_path / "state", Rules(grace=0), dry_run=False)
        return [verdict.reason for verdict in done.verdicts]

    held = lock.hold_manifest(here.path(old.name), old.digest)
    assert reasons() == ["newest", "running"]
    deep_verify(here, old.name)
    # JuiceFS gives it back when the kernel tells of the close, which returns before that.
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)
    assert reasons() == ["newest", "superseded"]
    deep_verify(here, new.name)


@contextlib.contextmanager
def queued(*roots: Path, ttl: float = 60) -> Iterator[list[Node]]:
    """Have one process after the other stand in line for the same thing."""
    in_line: list[Node] = []
    with contextlib.ExitStack() as closing:
        for root in roots:
            in_line.append(Node(root, 1, ttl))
            closing.callback(in_line[-1].close)
        yield in_line


def test_of_many_nodes_one_at_a_time_has_its_turn_and_the_first_to_come_is_first(
    nodes: Nodes,
) -> None:
    here, there = stores(nodes, "queue")
    with queued(*(here.root, there.root) * 3) as in_line:
        last = 0.0
        for node in in_line:
            assert node.had_turn() >= last
            last = node.let_go()
    # A line that nobody stands in is taken away.
    assert os.listdir(here.root / lease.LEASES) == []


# To the other node, one that is stopped looks like one whose host is gone.
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_another_node_takes_over_from_one_that_dies(nodes: Nodes, death: signal.Signals) -> None:
    here, there = stores(nodes, f"takes-over-{death}")
    with queued(here.root, there.root, ttl=3) as (holder, waiter):
        holder.had_turn()
        holder.process.send_signal(death)
        waiter.had_turn()
        assert holder.tickets == []


def test_another_node_takes_over_from_one_whose_mount_dies(nodes: Nodes, tmp_path: Path) -> None:
    here, _ = stores(nodes, "unmounted")
    third = tmp_path / "third"
    with (
        another_mount(nodes, third) as mount,
        queued(third / "unmounted", here.root, ttl=3) as (holder, waiter),
    ):
        holder.had_turn()
        os.killpg(mount.pid, signal.SIGKILL)
        waiter.had_turn()
        holder.let_go()


def test_a_live_node_is_never_taken_for_dead(nodes: Nodes) -> None:
    here, there = stores(nodes, "alive")
    with (
        queued(here.root, ttl=2) as (holder,),
        lease.queue(there.root, WHAT, pace=pace(ttl=2)) as ticket,
    ):
        holder.had_turn()
        assert ticket.wait(1, 6).how == "late"
        assert len(holder.tickets) == 1


def test_a_mount_that_dies_under_a_copy_is_said_soon(nodes: Nodes, tmp_path: Path) -> None:
    here, _ = stores(nodes, "dies")
    manifest = make_large(here.root, parts=2, part_bytes=256 << 20)
    (tmp_path / "local").mkdir()
    local = DirectoryStore(tmp_path / "local")
    killed: list[float] = []
    with another_mount(nodes, tmp_path / "third") as node:

        def kill(_: int) -> None:
            if not killed:
                os.killpg(node.pid, signal.SIGKILL)
                killed.append(time.monotonic())

        there = DirectoryStore(tmp_path / "third" / "dies")
        with (
            pytest.raises(StoreError, match=str(there.root)),
            local.stage(manifest.name) as staged,
        ):
            transfer.copy(there, manifest.name, manifest, manifest.files, staged, kill)
        assert time.monotonic() - killed[0] < 5
    assert local.names() == []
    assert left_over(local) == []


def test_a_probe_through_both_mounts_says_what_one_sees_of_the_other(
    nodes: Nodes, tmp_path: Path
) -> None:
    here, there = stores(nodes, "probe")
    house = House(tmp_path / "house")
    words = ("--seconds", 1, "--size", "4MiB", "--workers", 2, "--format", "json")
    found = house.run("probe", here.root, "--also", there.root, *words).json
    assert (found["verdict"], found["reasons"][0]["code"]) == ("copy", "fuse")
    assert found["file_system"]["kind"] == "fuse.juicefs"
    assert found["flock"] == "honoured"
    assert found["inotify"] == {"own": True, "across": False}
    assert found["rename"]["into_place"]["atomic"]
    assert found["failures"] == {}
    assert os.listdir(here.root) == []
    house.close()


@pytest.mark.long
def test_a_mount_that_stops_answering_under_a_probe_is_not_waited_for(
    nodes: Nodes, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    house = House(tmp_path / "house")
    with another_mount(nodes, third) as node:
        process = house.start("probe", third, "--seconds", 2, "--size", "64MiB")
        deadline = time.monotonic() + 20
        while not [*nodes.one.glob(".shardboot-probe-*/small")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(node.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        boot = house.finish(process)
        assert time.monotonic() - stopped < 25
        os.killpg(node.pid, signal.SIGCONT)
        assert boot.status == 30
        assert "keep away\n  no answer in time (" in boot.stdout
        # Once the mount answers, what was left behind cleans up.
        while [*nodes.one.glob(".shardboot-probe-*")]:
            assert time.monotonic() < deadline + 20
            time.sleep(0.05)
    house.close()
