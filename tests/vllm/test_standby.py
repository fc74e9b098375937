"""`serve --standby` with real vLLM: whatever is killed, a fork serves next, and answers alike."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from crashing import FOR_EVER, Crashes
from killing import PARTS, listener, part, wait_for_another
from models import make_model
from processes import descendants, run
from serving import FLAGS, OWN_SHM, Server, environment

from entrypoint.state.ledger import Ledger

pytestmark = pytest.mark.vllm

PROMPT: Final = "The first word"
MAX_RESIDENT: Final = 30 * 1024
"""KiB, of the supervisor."""

CRASHES: Final = 8
"""`scripts/bench/crashes` is for more."""

SEED: Final = 7


class Node:
    """A model saved at TP=2, and servers that are hits."""

    def __init__(self, room: Path) -> None:
        self.room, self.model = room, room / "model"
        make_model("dense", self.model)
        self.words = [str(self.model), *FLAGS, "-tp", "2"]
        self.environ = environment(2) | {
            "SHARDBOOT_LOCAL_DIR": str(room / "checkpoints"),
            "SHARDBOOT_STATE_DIR": str(room / "state"),
        }
        status, _ = run([self.shardboot, "save", *self.words], self.environ, room / "save.log")
        assert status == 0, (room / "save.log").read_text()

    @property
    def shardboot(self) -> str:
        return str(Path(sys.executable).with_name("shardboot"))

    def serve(self, *options: str) -> Server:
        """Start a server whose /dev/shm is its own, so that what is left there can be seen."""
        command = [*OWN_SHM, self.shardboot, "serve", *options, *self.words]
        return Server(command, self.environ, self.room / "server.log")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    if os.geteuid():
        pytest.skip("a /dev/shm of its own needs root")
    return Node(tmp_path_factory.mktemp("standby"))


def kept(supervisor: int) -> dict[str, int]:
    """Return what must not grow from server to server."""
    proc = Path(f"/proc/{supervisor}")
    return {
        "descriptors": len(list((proc / "fd").iterdir())),
        "processes": len(descendants(supervisor)),
        "segments": len(list((proc / "root/dev/shm").iterdir())),
    }


def resident(pid: int) -> int:
    """Return the resident memory of a process in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_whatever_part_is_killed_the_next_server_is_a_fork_and_answers_alike(node: Node) -> None:
    with node.serve("--standby") as server:
        serves, _ = wait_for_another(server, None)
        supervisor = server.process.pid
        answer = server.complete(str(node.model), PROMPT)
        before = kept(supervisor)
        for title in PARTS.values():
            os.kill(part(supervisor, title, serves), signal.SIGKILL)
            serves, _ = wait_for_another(server, serves)
            assert server.complete(str(node.model), PROMPT) == answer
            assert kept(supervisor) == before
        assert resident(supervisor) < MAX_RESIDENT
        said = server.log.read_text()
    assert "are spawned" not in said
    assert said.count("starting the next one now") + said.count("starting the next one in") == 3
    ends = [e for e in Ledger(node.room / "state").entries() if e.get("event") == "ended"]
    assert [e["told"] for e in ends] == [False, False, False, True]
    assert ends[0]["status"] == 128 + signal.SIGKILL


def test_whenever_and_whatever_is_killed_it_comes_back_and_holds_no_more(node: Node) -> None:
    with node.serve("--standby", *FOR_EVER) as server:
        crashes = Crashes(server, node.model, node.room / "state", SEED)
        before = crashes.held()
        print(f"seed {SEED}: {before}")
        crashes.run(CRASHES, print)
        after = crashes.held()
        print(after)
        assert after[:4] == before[:4]
        assert after.supervisor_rss < MAX_RESIDENT


def facts(server: Server, title: str, pid: int) -> dict[str, str]:
    """Return what one part of a server has of its start (proc(5))."""
    proc = Path(f"/proc/{part(server.process.pid, title, pid)}")
    pairs = (line.split(":\t") for line in (proc / "status").read_text().splitlines())
    wanted = ("Umask", "SigIgn", "Uid", "Gid", "Groups", "NoNewPrivs", "Cpus_allowed_list")
    found = {name: value for name, value in pairs if name in wanted}
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    return found | {"cwd": os.readlink(proc / "cwd"), "nice": stat[16], "policy": stat[38]}


def test_a_forked_server_is_as_one_that_was_started(node: Node) -> None:
    found = []
    answers = []
    for options in (("--standby",), ("--single-import", "no"), ("--single-import", "yes")):
        with node.serve(*options) as server:
            server.wait_until_healthy()
            pid = listener(server.process.pid, server.port)
            assert pid is not None
            found.append({name: facts(server, title, pid) for name, title in PARTS.items()})
            answers.append(server.complete(str(node.model), PROMPT))
            said = server.log.read_text()
        assert "are spawned" not in said
    assert found[0] == found[1] == found[2]
    assert answers[0] == answers[1] == answers[2]
