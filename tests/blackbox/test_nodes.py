"""One model over several nodes: each copies the files of its own ranks, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blackbox.harness import Boot, House, snapshot, staged
from store_contract import deep_verify

from entrypoint.checkpoint.inspect import ranks_held
from entrypoint.checkpoint.manifest import Manifest, decode

WORLD = 2


def place(rank: int, nodes: int = WORLD) -> list[object]:
    """Return the words of one node among several."""
    headless = ["--headless"] if rank else []
    return ["--nnodes", nodes, "--node-rank", rank, *headless]


class Cluster:
    """Nodes that see one model and one shared store, in which one machine has put a checkpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine = House(root / "machine")
        self.nodes = [House(root / f"node-{number}") for number in range(WORLD)]
        self.shared = root / "machine/shared"
        for node in self.nodes:
            node.environ["SHARDBOOT_SHARED"] = str(self.shared)

    def save(self, **more: Any) -> Manifest:
        """Save and push on one machine, at the same TP; return the manifest."""
        words = ("--shared", self.shared, "--publish", self.machine.model, "-tp", WORLD)
        boot = self.machine.run("serve", *words, **more)
        assert "push.done" in boot.events, boot.stderr
        [name] = self.machine.store.names()
        return decode(self.machine.store.read_manifest(name))

    def start(self, number: int, rank: int, **more: Any) -> Any:
        words = ("serve", self.machine.model, "-tp", WORLD, *place(rank))
        return self.nodes[number].start(*words, **more)

    def boot(self, number: int, rank: int | None = None, **more: Any) -> Boot:
        process = self.start(number, number if rank is None else rank, **more)
        return self.nodes[number].finish(process)

    def run(self, number: int, *command: object, **more: Any) -> Boot:
        words = (self.machine.model, "-tp", WORLD, *place(number))
        return self.nodes[number].run(*command, *words, **more)

    def close(self) -> None:
        for house in (self.machine, *self.nodes):
            house.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def held(node: House) -> set[int] | None:
    [name] = node.store.names()
    deep_verify(node.store, name)
    return ranks_held(node.store.path(name))


def weights_in(node: House) -> int:
    [name] = node.store.names()
    return sum(path.stat().st_size for path in node.store.path(name).glob("*.safetensors"))


def test_each_node_copies_its_own_half_and_finds_it_the_next_time(cluster: Cluster) -> None:
    manifest = cluster.save()
    for number, node in enumerate(cluster.nodes):
        boot = cluster.boot(number)
        assert boot.status == 0, boot.stderr
        assert boot.events[-3:] == ["shared.hit", "copy.done", "local.hit"]
        assert f"{manifest.name}: rank {number} of 2 is here" in boot.stderr
        assert held(node) == {number}
        assert boot.words[0] == str(node.local / manifest.name)
        assert node.ledger[-1]["ranks"] == f"rank {number} of 2"
        before = snapshot(node.local)
        again = cluster.boot(number)
        assert again.events[-1] == "local.hit"
        assert "copy.done" not in again.events
        assert again.lasting_words == boot.lasting_words
        assert snapshot(node.local) == before
        assert "save" not in node.calls
    shards = sum(entry.size for entry in manifest.files if entry.role == "weights")
    assert weights_in(cluster.nodes[0]) + weights_in(cluster.nodes[1]) == shards


def test_where_all_ranks_are_here_nothing_is_said_of_them(cluster: Cluster) -> None:
    cluster.save()
    boot = cluster.machine.serve(*place(1))
    assert boot.events[-1] == "local.hit"
    assert "of 2" not in boot.stderr
    assert "ranks" not in cluster.machine.ledger[-1]


def test_plan_and_status_say_which_ranks_are_here(cluster: Cluster) -> None:
    manifest = cluster.save()
    planned = cluster.run(1, "plan", "--format", "json").json
    assert (planned["action"], planned["reason"]) == ("copy", "shared.hit")
    assert cluster.boot(1).status == 0
    planned = cluster.run(1, "plan", "--format", "json").json
    assert planned["action"] == "reuse"
    assert planned["findings"]["local"]["ranks"] == "rank 1 of 2"
    [row] = cluster.nodes[1].run("status", "--format", "json").json
    assert row["ranks"] == "rank 1 of 2"
    assert f"{manifest.name}, rank 1 of 2" in cluster.nodes[1].run("status").stdout


def test_a_node_that_changes_its_rank_completes_the_checkpoint(cluster: Cluster) -> None:
    cluster.save()
    node = cluster.nodes[0]
    assert cluster.boot(0, 0).events[-1] == "local.hit"
    boot = cluster.boot(0, 1)
    assert boot.events[-3:] == ["shared.hit", "copy.done", "local.hit"]
    assert "holds rank 0 of 2, and lacks rank 1 of 2" in boot.stderr
    assert held(node) is None
    # And a machine that needs them all has them all.
    alone = node.run("serve", cluster.machine.model, "-tp", WORLD)
    assert alone.events[-1] == "local.hit"
    assert "copy.done" not in alone.events


def test_two_servers_that_share_a_local_store_end_with_one_whole_checkpoint(
    cluster: Cluster,
) -> None:
    manifest = cluster.save()
    one, other = cluster.nodes
    other.environ["SHARDBOOT_LOCAL_DIR"] = str(one.local)
    processes = [cluster.start(0, 0), cluster.start(1, 1)]
    boots = [n.finish(p) for n, p in zip(cluster.nodes, processes, strict=True)]
    for boot in boots:
        assert boot.status == 0, boot.stderr
        assert boot.events[-1] == "local.hit"
        assert boot.words[0] == str(one.local / manifest.name)
    assert held(one) is None
    assert not list(staged(one.local))


def test_without_a_checkpoint_the_source_is_served_and_nobody_saves(cluster: Cluster) -> None:
    for number in range(WORLD):
        boot = cluster.boot(number)
        assert boot.events[-1] == "layout.multinode"
        assert "no checkpoint in the shared store; one of 2 nodes cannot save" in boot.stderr
        assert boot.words[0] == str(cluster.machine.model)
        assert cluster.nodes[number].calls == ["resolve", "serve"]


@pytest.mark.parametrize("command", ["save", "prove"])
def test_a_save_and_a_proof_on_one_of_many_nodes_are_refused_in_one_line(
    cluster: Cluster, command: str
) -> None:
    refused = cluster.run(0, command)
    assert refused.status == 50
    assert "error: layout.multinode: one of 2 nodes cannot save or prove" in refused.stderr
    assert cluster.nodes[0].calls == ["resolve"]


def test_a_node_that_holds_some_ranks_pushes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    manifest = cluster.save()
    assert cluster.boot(1).status == 0
    (tmp_path / "far").mkdir()
    refused = cluster.run(1, "push", SHARDBOOT_SHARED=tmp_path / "far")
    assert refused.status == 31
    assert (
        f"{manifest.name}: the local store has rank 1 of 2 only, and a push takes all"
        in refused.stderr
    )
    assert not list((tmp_path / "far").iterdir())


def test_an_interrupted_copy_of_another_rank_is_left_to_it(cluster: Cluster) -> None:
    manifest = cluster.save()
    node = cluster.nodes[0]
    node.local.mkdir()
    with node.store.stage(manifest.name, manifest.part([1])) as left:
        left.write_file("model-rank-1-part-0.safetensors", b"the begin of it")
        left.disown()
    assert cluster.boot(0, 0).events[-1] == "local.hit"
    assert held(node) == {0}
    boot = cluster.boot(0, 1)
    assert "copy.resumed" in boot.events
    assert held(node) is None
    assert not list(staged(node.local))


def test_what_needs_a_proof_and_carries_none_is_not_served_over_nodes(cluster: Cluster) -> None:
    cluster.save()
    for number, node in enumerate(cluster.nodes):
        node.rules(resolve={"change": {"kind": {"moe": True}}})
        boot = cluster.boot(number)
        assert boot.events[-1] == "layout.multinode"
        assert "never proved to load to the source's state" in boot.stderr
        assert boot.words[0] == str(cluster.machine.model)


def test_a_damaged_part_is_copied_again_with_what_this_node_needs(cluster: Cluster) -> None:
    manifest = cluster.save()
    node = cluster.nodes[0]
    assert cluster.boot(0).status == 0
    (node.local / manifest.name / "model-rank-0-part-0.safetensors").unlink()
    boot = cluster.boot(0)
    assert "is damaged" in boot.stderr
    assert boot.events[-2:] == ["copy.done", "local.hit"]
    assert held(node) == {0}


def test_gc_keeps_the_part_that_a_node_serves_and_takes_what_is_superseded(
    cluster: Cluster,
) -> None:
    cluster.save()
    assert cluster.boot(1).status == 0
    done = json.loads(cluster.nodes[1].run("gc", "--grace", "0s", "--format", "json").stdout)
    [kept] = done["checkpoints"]
    assert not kept["collected"]
    [name] = cluster.nodes[1].store.names()
    manifest = decode(cluster.nodes[1].store.read_manifest(name))
    assert kept["bytes"] == manifest.size_for([1])
