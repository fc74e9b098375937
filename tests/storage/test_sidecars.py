"""Sidecars of two nodes on one JuiceFS, each with its own mount, and no notices between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blackbox.harness import House
from blackbox.sidecars import sidecar
from blackbox.watching import note
from checkpoints import make_checkpoint, make_key
from juicefs import Nodes, stores
from releases import serve

from entrypoint.checkpoint.digest import digest_bytes

REST = ("--scrub-interval", "never")
PUBLISHED = "shardboot_published_checkpoints_total"
RUNS = 'shardboot_job_runs_total{job="publish"}'
THERE = 'shardboot_checkpoints{state="complete",store="shared"}'


@pytest.fixture
def two(nodes: Nodes, tmp_path: Path) -> Iterator[list[House]]:
    made = [House(tmp_path / name) for name in ("a", "b")]
    for house, store in zip(made, stores(nodes, tmp_path.name), strict=True):
        house.shared = store.root
    yield made
    for house in made:
        house.close()


def test_what_another_node_pushes_is_seen_by_looking_and_that_is_said(two: list[House]) -> None:
    there, here = two
    serve(here.state, make_checkpoint(here.local, name="old"), pid=1, pid_start=0)
    with sidecar(here, *REST) as running:
        assert "of what others do on fuse.juicefs no kernel tells" in running.wait_for("watch")
        key = make_key(model=digest_bytes(b"new"))
        make_checkpoint(there.shared, name="new", key=key, created_at="2026-02-01T00:00:00Z")
        running.wait_for("copy.done")
    assert here.store.names() == ["new", "old"]


def test_of_two_nodes_that_have_the_same_key_one_publishes(two: list[House]) -> None:
    for house in two:
        house.serve()
        note(house, "loaded")
    with ExitStack() as stack:
        running = [stack.enter_context(sidecar(house, "--publish", *REST)) for house in two]
        for one in running:
            one.wait_until(THERE, 1)
        found = [one.wait_until(RUNS, one.metrics()[RUNS] + 3) for one in running]
        assert sum(each[PUBLISHED] for each in found) == 1
        assert [each[THERE] for each in found] == [1, 1]
