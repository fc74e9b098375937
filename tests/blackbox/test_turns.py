"""Many nodes that miss at once: one saves, the others wait for it and copy."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blackbox.harness import Boot, House, make_source
from store_contract import deep_verify

from entrypoint.store.directory import DirectoryStore

Nodes = Callable[[int], list[House]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Make nodes that see one shared store, and one model."""
    made: list[House] = []
    make_source(tmp_path / "model")

    def make(count: int) -> list[House]:
        for number in range(count):
            node = House(tmp_path / f"node-{number}")
            node.environ |= {
                "SHARDBOOT_SHARED": str(tmp_path / "shared"),
                "SHARDBOOT_PUBLISH": "yes",
            }
            made.append(node)
        (tmp_path / "shared").mkdir()
        return made

    yield make
    for node in made:
        node.close()


def start(node: House, **more: Any) -> subprocess.Popen[str]:
    return node.start("serve", node.root.parent / "model", "-tp", 2, **more)


def saves(nodes: list[House]) -> int:
    return sum(node.calls.count("save") for node in nodes)


def all_serve_a_whole_checkpoint(nodes: list[House], boots: list[Boot]) -> None:
    for node, boot in zip(nodes, boots, strict=True):
        assert boot.status == 0, boot.stderr
        assert boot.events[-1] == "local.hit"
        (name,) = node.store.names()
        deep_verify(node.store, name)
        assert boot.words[0] == str(node.local / name)


def test_nodes_that_miss_at_once_save_once(nodes: Nodes) -> None:
    four = nodes(4)
    processes = [start(node) for node in four]
    boots = [node.finish(process) for node, process in zip(four, processes, strict=True)]
    all_serve_a_whole_checkpoint(four, boots)
    assert saves(four) == 1
    copied = ["shared.hit", "copy.done", "local.hit"]
    assert [boot.events[-3:] for boot in boots].count(copied) == 3


def test_another_node_saves_where_the_first_one_was_killed(nodes: Nodes) -> None:
    first, second = nodes(2)
    first.rules(save={"hang": True})
    dying = start(first)
    first.wait_for("hanging")
    waiting = start(second)
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "lease.wait" in line:
            break
    dying.send_signal(signal.SIGKILL)
    first.finish(dying)
    first.end_hanging()
    assert second.finish(waiting).events[-3:] == ["save.done", "push.done", "local.hit"]


def test_nodes_that_publish_nothing_do_not_wait_for_each_other(nodes: Nodes) -> None:
    first, second = nodes(2)
    first.rules(save={"hang": True})
    process = start(first)
    first.wait_for("hanging")
    boot = second.finish(start(second, SHARDBOOT_PUBLISH="no"))
    assert boot.events[-2:] == ["save.done", "local.hit"]
    process.send_signal(signal.SIGTERM)
    first.finish(process)


def test_where_no_ticket_can_be_written_nobody_waits(nodes: Nodes) -> None:
    first, second = nodes(2)
    (first.root.parent / "shared/.leases").write_text("in the way")
    first.rules(save={"hang": True})
    process = start(first)
    first.wait_for("hanging")
    boot = second.finish(start(second))
    assert "going on without" in boot.stderr
    all_serve_a_whole_checkpoint([second], [boot])
    process.send_signal(signal.SIGTERM)
    first.finish(process)


def test_a_node_that_met_damage_in_the_shared_store_saves_and_publishes_another(
    nodes: Nodes,
) -> None:
    first, second = nodes(2)
    all_serve_a_whole_checkpoint([first], [first.finish(start(first))])
    shared = DirectoryStore(first.root.parent / "shared")
    (name,) = shared.names()
    weights = next(shared.path(name).glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    boot = second.finish(start(second))
    assert boot.events[-3:] == ["save.done", "push.done", "local.hit"]
    assert boot.events.count("shared.hit") == 1
    assert shared.names() == [f"{name}-g2", name]
    deep_verify(shared, f"{name}-g2")


def test_so_many_readers_copy_at_once_and_the_others_wait(nodes: Nodes) -> None:
    """The only place is taken by a copy that was stopped: the next one waits until it goes on."""
    saver, first, second = nodes(3)
    all_serve_a_whole_checkpoint([saver], [saver.finish(start(saver))])
    reading = start(first, SHARDBOOT_SHARED_READERS=1)
    readers = saver.root.parent / "shared/.leases/readers"
    wait_for_ticket(readers)
    reading.send_signal(signal.SIGSTOP)
    waiting = start(second, SHARDBOOT_SHARED_READERS=1)
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "lease.wait" in line:
            assert f"process {reading.pid}" in line
            break
    reading.send_signal(signal.SIGCONT)
    boots = [first.finish(reading), second.finish(waiting)]
    all_serve_a_whole_checkpoint([first, second], boots)
    assert saves([saver, first, second]) == 1


def wait_for_ticket(directory: Path) -> None:
    deadline = time.monotonic() + 20
    while not directory.is_dir() or not any(directory.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


LYING = """\
import fcntl
fcntl.flock = lambda descriptor, operation: None
"""


def test_with_locks_that_lie_and_leases_that_vanish_all_serve_the_same(
    nodes: Nodes, tmp_path: Path
) -> None:
    """More bytes are moved than need be, and that is all."""
    injected = tmp_path / "injected"
    injected.mkdir()
    (injected / "sitecustomize.py").write_text(LYING)
    two = nodes(2)
    for node in two:
        node.environ["PYTHONPATH"] = f"{injected}:{node.environ['PYTHONPATH']}"
    running = [(node, start(node)) for node in two for _ in range(2)]
    while any(process.poll() is None for _, process in running):
        shutil.rmtree(tmp_path / "shared/.leases", ignore_errors=True)
        time.sleep(0.05)  # a vandal with a pause, not a wait
    for node, process in running:
        boot = node.finish(process)
        assert (boot.status, boot.events[-1]) == (0, "local.hit"), boot.stderr
        # Two saves are two checkpoints: the second takes the next generation's name.
        assert boot.words[0] in [str(node.local / name) for name in node.store.names()]
    for store in (DirectoryStore(tmp_path / "shared"), *(node.store for node in two)):
        assert store.names()
        for name in store.names():
            deep_verify(store, name)
    assert 1 <= saves(two) <= 4
