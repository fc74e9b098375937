"""Several sidecars, and boots, that could publish the same: one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blackbox.harness import House
from blackbox.sidecars import POWERLESS, Sidecar, sidecar
from blackbox.watching import note

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.steps import lock_file
from entrypoint.store import lock
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import manifest_of

WORDS = ("--publish", "--scrub-interval", "never")
PUBLISHED = "shardboot_published_checkpoints_total"
RUNS = 'shardboot_job_runs_total{job="publish"}'
THERE = 'shardboot_checkpoints{state="complete",store="shared"}'


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[House]]:
    """Two nodes that each have saved the same key, and loaded it."""
    nodes = [House(tmp_path / name) for name in ("a", "b")]
    for node in nodes:
        node.shared = tmp_path / "shared"
        node.serve()
        note(node, "loaded")
    (tmp_path / "shared").mkdir()
    yield nodes
    for node in nodes:
        node.close()


def saved(node: House) -> Manifest:
    (name,) = node.store.names()
    return manifest_of(node.store, name)


def wait_for_rounds(running: Sidecar, more: int) -> dict[str, float]:
    return running.wait_until(RUNS, running.metrics()[RUNS] + more)


def test_of_two_that_have_the_same_key_one_publishes(two: list[House]) -> None:
    assert saved(two[0]).key == saved(two[1]).key
    with ExitStack() as stack:
        running = [stack.enter_context(sidecar(node, *WORDS)) for node in two]
        for one in running:
            one.wait_until(THERE, 1)
        found = [wait_for_rounds(one, 3) for one in running]
        assert sum(each[PUBLISHED] for each in found) == 1
        assert [each[THERE] for each in found] == [1, 1]
    assert len(DirectoryStore(two[0].shared).names()) == 1


def test_who_waits_publishes_after_the_other_was_killed(two: list[House]) -> None:
    first, second = two
    with sidecar(first, *WORDS, **first.slow_reads()) as dying:
        first.wait_for("reading")
        with sidecar(second, *WORDS) as waiting:
            assert f"process {dying.process.pid}" in waiting.wait_for("publish.waits")
            assert waiting.metrics()[PUBLISHED] == 0
            assert waiting.get("/readyz")[0] == 200
            dying.process.kill()
            waiting.wait_for("push.done")
    assert len(DirectoryStore(first.shared).names()) == 1


def test_who_may_only_read_here_publishes_all_the_same(house: House) -> None:
    house.serve()
    note(house, "loaded")
    for left in house.local.glob(".*.lock"):
        left.unlink()
    house.local.chmod(0o555)
    with sidecar(house, *WORDS, prefix=POWERLESS) as running:
        running.wait_for("push.done")
    house.local.chmod(0o755)


def test_what_a_boot_of_this_host_has_in_hand_is_left_to_it(house: House) -> None:
    house.serve()
    note(house, "loaded")
    made = saved(house)
    path = lock_file(house.local, made.key.subject(made.source.name))
    with lock.exclusive(path, 0.0), sidecar(house, *WORDS) as running:
        assert "a boot of this host is at it" in running.wait_for("publish.waits")
        assert not DirectoryStore(house.shared).names()
