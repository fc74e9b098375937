"""A bad checkpoint must not kill boot after boot; a rollout that is aborted is nobody's fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from poison import reshape_one_tensor, truncate_one_file
from processes import ProgramError, run
from serving import FLAGS, Boot, Server, boot, decision, environment

from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.state import stops
from entrypoint.state.ledger import Ledger

pytestmark = pytest.mark.vllm

PROMPT = "The first word"


class Node:
    """A host with a model, a store, and servers that start again and again."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.model = room / "model"
        self.environ = environment() | {
            "SHARDBOOT_LOCAL_DIR": str(room / "checkpoints"),
            "SHARDBOOT_STATE_DIR": str(room / "state"),
            "SHARDBOOT_LOG_FORMAT": "json",
        }
        self.count = 0

    def log(self) -> Path:
        self.count += 1
        return self.room / f"{self.count}.log"

    def command(self, *words: str) -> list[str]:
        return [str(Path(sys.executable).with_name("shardboot")), *words]

    def boot(self, model: Path | None = None) -> Boot:
        word = str(model or self.model)
        command = self.command("serve", word, *FLAGS)
        return boot(command, self.environ, self.log(), model=word, prompt=PROMPT)

    def tell(self, *words: str) -> Any:
        log = self.log()
        verb, *rest = words
        status, said = run(self.command(verb, "--format", "json", *rest), self.environ, log)
        assert status == 0, log.read_text()
        return json.loads(said)

    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = self.tell("plan", str(self.model), *FLAGS)
        return found

    def events(self) -> list[str]:
        entries = Ledger(self.room / "state").entries()
        # How long vLLM's own steps took is nobody's business here.
        return [str(entry.get("event")) for entry in entries if entry.get("event") != "phase"]

    @property
    def checkpoint(self) -> Path:
        """The newest generation."""
        found = (self.room / "checkpoints").glob(f"*/{MANIFEST}")
        return max(found, key=lambda path: path.stat().st_mtime_ns).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Boot]]:
    room = tmp_path_factory.mktemp("crash")
    make_model("dense", room / "model")
    first = Node(room).boot()
    yield room, first
    shutil.rmtree(room)


@pytest.fixture
def node(saved: tuple[Path, Boot], tmp_path: Path) -> Node:
    """Return a fresh copy of a node that has saved its checkpoint."""
    room, _ = saved
    for part in ("checkpoints", "state"):
        shutil.copytree(room / part, tmp_path / part, symlinks=True)
    found = Node(tmp_path)
    found.model = room / "model"
    return found


def strace(*injections: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: no way to die, or to hang, in the midst of a load")
    calls = ",".join(injection.partition(":")[0] for injection in injections)
    words = [word for i in injections for word in ("-e", f"inject={i}")]
    return ["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "-e", f"trace={calls}", *words]


def test_a_tensor_of_another_shape_is_met_by_loading_the_source_in_the_same_process(
    saved: tuple[Path, Boot], node: Node
) -> None:
    _, first = saved
    manifest = reshape_one_tensor(node.checkpoint)
    served = node.boot()
    assert served.answer == first.answer
    told = ["attempt", "loading", "objection", "fell-back", "serving"]
    assert node.events()[-5:] == told
    again = node.plan()
    assert (again["action"], again["reason"]) == ("serve-source", "local.unfit")
    assert "the model has" in again["findings"]["local"]["reason"]
    # A save that the operator asks for gets the next generation, and is served.
    made = node.tell("save", str(node.model), *FLAGS)
    assert made["checkpoint"]["name"] == f"{manifest.name}-g2"
    assert node.plan()["checkpoint"]["name"] == f"{manifest.name}-g2"


@pytest.mark.long
def test_a_truncated_file_is_found_before_exec_and_saved_anew(
    saved: tuple[Path, Boot], node: Node
) -> None:
    _, first = saved
    truncate_one_file(node.checkpoint)
    assert node.plan()["reason"] == "local.damaged"
    served = node.boot()
    assert (served.tier, served.reason) == ("saved", "local.damaged")
    assert served.answer == first.answer
    assert node.checkpoint.name.endswith("-g2")


@pytest.mark.long
def test_three_boots_that_die_while_loading_are_enough(
    saved: tuple[Path, Boot], node: Node
) -> None:
    _, first = saved
    killer = strace("preadv,preadv2:signal=SIGKILL")
    for _ in range(3):
        with pytest.raises(ProgramError, match="ended with status"):
            boot(
                [*killer, *node.command("serve", str(node.model), *FLAGS)],
                node.environ,
                node.log(),
                model=str(node.model),
                prompt=PROMPT,
            )
    assert node.events().count("loading") - node.events().count("loaded") == 3
    name = node.checkpoint.name
    served = node.boot()
    assert served.answer == first.answer
    assert decision(node.room / f"{node.count}.log") == ("plain", "local.quarantined")
    assert node.plan()["reason"] == "local.quarantined"
    node.tell("unreject", name)
    found = node.plan()
    assert (found["action"], found["checkpoint"]["name"]) == ("reuse", name)


@pytest.mark.long
def test_rollouts_aborted_in_the_midst_of_a_load_quarantine_nothing(node: Node) -> None:
    slow = strace("preadv,preadv2:delay_enter=60000000")
    for count in range(1, 6):
        command = [*slow, *node.command("serve", str(node.model), *FLAGS)]
        with Server(command, node.environ, node.log()) as server:
            wait_for(lambda count=count: loading_since_save(node) == count, server)
            (child,) = Path(f"/proc/{server.process.pid}/task").glob("*/children")
            (vllm,) = child.read_text().split()
            os.kill(int(vllm), signal.SIGTERM)
            # The worker is not told, and reads on; as at the end of a grace time, Server kills it.
            wait_for(lambda count=count: len(stops.told(node.room / "state")) == count, server)
    assert node.events().count("loaded") == 1
    assert node.plan()["reason"] == "local.hit"


def loading_since_save(node: Node) -> int:
    return node.events().count("loading") - node.events().count("loaded")


def wait_for(condition: Any, server: Server) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert server.process.poll() is None, server.last_lines()
        assert time.monotonic() < deadline, server.last_lines()
        time.sleep(0.1)
