"""One model over two nodes of real vLLM, each with its own disk: half of the bytes on each."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from processes import Program, run
from serving import FLAGS, POLL_SECONDS, Answer, Server, cores, decision, environment, free_port

from entrypoint.checkpoint.inspect import ranks_held, read_manifest
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.state import stops
from entrypoint.state.ledger import Ledger

pytestmark = pytest.mark.vllm

PROMPT = "The first word"
BINARIES = Path(sys.executable).parent


class Cluster:
    """Two nodes on the loopback, and a shared directory that both see."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.model, self.shared = room / "model", room / "shared"
        make_model("dense", self.model)
        self.shared.mkdir()
        self.port = free_port()
        self.boots = 0

    def environ(self, name: str, core: str | None = None) -> dict[str, str]:
        return environment(tp=2) | {
            "VLLM_CPU_OMP_THREADS_BIND": core or cores(2),
            "SHARDBOOT_LOCAL_DIR": str(self.store(name)),
            "SHARDBOOT_STATE_DIR": str(self.room / name / "state"),
            "SHARDBOOT_SHARED": str(self.shared),
            "SHARDBOOT_LOG_FORMAT": "json",
        }

    def node(self, number: int) -> dict[str, str]:
        """Return the environment of a node, whose only worker has a core to itself."""
        return self.environ(f"node-{number}", cores(2).split("|")[number])

    def store(self, name: str) -> Path:
        return self.room / name / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        (found,) = self.store(name).glob(f"*/{MANIFEST}")
        return found.parent

    def notes(self, node: int) -> list[str]:
        """Return what the last boot of a node left in its ledger."""
        entries = list(Ledger(self.room / f"node-{node}" / "state").entries())
        last = [entry["boot"] for entry in entries if entry["event"] == "attempt"][-1]
        return [str(entry["event"]) for entry in entries if entry["boot"] == last]

    def save(self) -> Manifest:
        """Save and push on one machine that runs both ranks."""
        environ = self.environ("machine")
        for command in ("save", "push"):
            line = [str(BINARIES / "shardboot"), command, str(self.model), *FLAGS, "-tp", "2"]
            log = self.room / f"{command}.log"
            status, _ = run(line, environ, log)
            assert status == 0, log.read_text()
        return read_manifest(self.checkpoint("machine"))

    @contextmanager
    def booted(self, programs: tuple[str, str]) -> Iterator[tuple[Server, Program]]:
        """Boot both nodes, the second one headless, until the first one answers."""
        self.boots += 1
        first, second = (
            [str(BINARIES / program), "serve", *self.words(node)]
            for node, program in enumerate(programs)
        )
        with (
            Program(second, self.node(1), self.log(1)) as follower,
            Server(first, self.node(0), self.log(0)) as leader,
        ):
            leader.wait_until_healthy()
            yield leader, follower

    def words(self, node: int) -> list[str]:
        words = [str(self.model), *FLAGS, "-tp", "2", "--nnodes", "2", "--node-rank", str(node)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        return [*words, "--headless"] if node else words

    def log(self, node: int) -> Path:
        return self.room / f"{self.boots}-node-{node}.log"

    def boot(self, *programs: str) -> tuple[Answer, list[tuple[str, str]]]:
        """Boot both nodes and ask; return the answer, and how each node decided."""
        one, other = programs or ("shardboot", "shardboot")
        with self.booted((one, other)) as (leader, _):
            answer = leader.complete(str(self.model), PROMPT)
        return answer, [decision(self.log(node)) for node in range(2)]

    def ask(self, node: int, command: str, *words: str) -> Mapping[str, Any]:
        line = [str(BINARIES / "shardboot"), command, "--format", "json", *words]
        _, said = run(line, self.node(node), self.room / "ask.log")
        found: dict[str, Any] = json.loads(said)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    room = tmp_path_factory.mktemp("nodes")
    yield Cluster(room)
    shutil.rmtree(room)


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Answer:
    answer, _ = cluster.boot("vllm", "vllm")
    return answer


@dataclass(frozen=True)
class First:
    """The first boot of both nodes: what came of it, and the checkpoint in the shared store."""

    manifest: Manifest
    answer: Answer
    decided: list[tuple[str, str]]
    health: list[Mapping[str, Any]]
    pids: list[int]


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> First:
    manifest = cluster.save()
    with cluster.booted(("shardboot", "shardboot")) as (leader, follower):
        answer = leader.complete(str(cluster.model), PROMPT)
        health = [cluster.ask(node, "health") for node in range(2)]
    decided = [decision(cluster.log(node)) for node in range(2)]
    return First(manifest, answer, decided, health, [leader.process.pid, follower.process.pid])


def test_two_nodes_copy_half_each_and_serve(cluster: Cluster, first: First) -> None:
    assert first.decided == [("shared", "shared.hit")] * 2
    # A model that says one token over and over would hide a wrong weight.
    assert len(set(first.answer.tokens)) > 3
    for node in range(2):
        directory = cluster.checkpoint(f"node-{node}")
        assert ranks_held(directory) == {node}
        shards = {path.name for path in directory.glob("*.safetensors")}
        assert shards == {entry.path for entry in first.manifest.files if entry.rank == node}
        planned = cluster.ask(node, "plan", *cluster.words(node))
        assert (planned["action"], planned["reason"]) == ("reuse", "local.hit")


def test_a_node_without_http_is_known_by_its_own_loaders_notes(
    cluster: Cluster, first: First
) -> None:
    assert [each["phase"] for each in first.health] == ["serving", "serving"]
    assert [each["pid"] for each in first.health] == first.pids
    for node in range(2):
        assert cluster.notes(node)[:4] == ["copy.done", "attempt", "loading", "loaded"]


@pytest.mark.long
def test_two_nodes_answer_as_vllm_alone_does_over_the_same_nodes(
    plain: Answer, first: First
) -> None:
    assert first.answer == plain


@pytest.mark.long
def test_the_next_boot_is_a_hit_on_both_nodes(
    cluster: Cluster, plain: Answer, first: First
) -> None:
    answer, decided = cluster.boot()
    assert first.decided != decided
    assert decided == [("local", "local.hit")] * 2
    assert answer == plain


@pytest.mark.long
def test_a_node_without_http_that_is_told_to_stop_leaves_a_note(
    cluster: Cluster, first: First
) -> None:
    """Alone it waits for the other node: a stop that is no fault of the weights."""
    state = cluster.room / "node-1" / "state"
    before = set((state / "stops").iterdir())
    command = [str(BINARIES / "shardboot"), "serve", *cluster.words(1)]
    with Program(command, cluster.node(1), cluster.log(1)) as follower:
        while not (begun := set((state / "stops").iterdir()) - before):
            assert follower.process.poll() is None, follower.last_lines()
            time.sleep(POLL_SECONDS)
    [note] = begun
    assert {"boot": note.name, "event": "stopped"} in stops.told(state)


@pytest.mark.long
def test_other_weights_on_one_node_make_both_load_the_source(
    cluster: Cluster, plain: Answer, first: First
) -> None:
    directory = cluster.checkpoint("node-1")
    manifest = read_manifest(directory)
    # Of files that this node has not.
    files = [e if e.rank != 0 else e._replace(blake3="0" * 64) for e in manifest.files]
    (directory / MANIFEST).write_bytes(manifest._replace(files=tuple(files)).encode())
    answer, decided = cluster.boot()
    assert decided == [("local", "local.hit")] * 2
    assert answer == plain
    for node in range(2):
        assert "which hold other weights. Loading the source" in cluster.log(node).read_text()
        assert cluster.notes(node)[:3] == ["attempt", "objection", "fell-back"]


@pytest.mark.long
def test_a_node_that_serves_the_source_makes_the_other_load_it_too(
    cluster: Cluster, plain: Answer, first: First
) -> None:
    answer, decided = cluster.boot("shardboot", "vllm")
    assert decided[0] == ("local", "local.hit")
    assert answer == plain
    assert "workers of another node load no checkpoint" in cluster.log(0).read_text()
