"""What real vLLM compiles is kept for a checkpoint, and stops no boot when it is bad."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import make_model
from processes import ProgramError
from serving import Boot, Server, boot, environment, events

from entrypoint.state.ledger import Ledger

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROMPT = "The first word"
FLAGS = ("--max-model-len", "512", "--dtype", "bfloat16")


class Node:
    """A host whose servers compile, and have a home that none of them had before."""

    def __init__(self, room: Path, model: Path) -> None:
        self.room, self.model = room, model
        self.state = room / "state"
        self.environ = environment() | {
            "SHARDBOOT_LOCAL_DIR": str(room / "checkpoints"),
            "SHARDBOOT_STATE_DIR": str(self.state),
            "SHARDBOOT_LOG_FORMAT": "json",
        }
        self.count = 0

    @property
    def command(self) -> list[str]:
        program = Path(sys.executable).with_name("shardboot")
        return [str(program), "serve", str(self.model), *FLAGS]

    def log(self) -> Path:
        self.count += 1
        return self.room / f"{self.count}.log"

    def boot(self) -> Boot:
        home = self.room / f"home{self.count}"
        home.mkdir()
        environ = self.environ | {"HOME": str(home)}
        log = self.log()
        return boot(self.command, environ, log, model=str(self.model), prompt=PROMPT)

    @property
    def said(self) -> list[str]:
        log = self.room / f"{self.count}.log"
        return [str(event["event"]) for event in events(log)]

    @property
    def noted(self) -> list[str]:
        return [str(entry["event"]) for entry in Ledger(self.state).entries()]

    def compiled(self) -> list[Path]:
        """Return every file that a compiler has left, locks aside."""
        files = [path for path in (self.state / "caches").rglob("*") if path.is_file()]
        return [path for path in files if path.suffix != ".lock" and path.name[0] != "."]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Boot]]:
    room = tmp_path_factory.mktemp("caches")
    make_model("dense", room / "model")
    node = Node(room, room / "model")
    yield node, node.boot()
    shutil.rmtree(room)


def test_what_is_compiled_lies_in_the_place_of_the_checkpoint(served: tuple[Node, Boot]) -> None:
    node, _ = served
    names = {path.relative_to(node.state / "caches").parts[1] for path in node.compiled()}
    assert "vllm" in names
    assert any(path.suffix == ".so" for path in node.compiled())
    # Where it was before: in the home.
    assert not (node.room / "home0" / ".cache" / "vllm" / "torch_compile_cache").exists()
    assert node.noted[-3:] == ["loading", "loaded", "serving"]


def test_the_next_boot_compiles_nothing_anew(served: tuple[Node, Boot]) -> None:
    node, first = served
    before = {path: path.stat().st_mtime_ns for path in node.compiled() if path.suffix == ".so"}
    assert node.boot().answer == first.answer
    after = {path: path.stat().st_mtime_ns for path in node.compiled() if path.suffix == ".so"}
    assert after == before


def test_caches_that_are_torn_cost_a_compilation_and_no_boot(served: tuple[Node, Boot]) -> None:
    node, first = served
    for number, path in enumerate(node.compiled()):
        if number % 2:
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.write_bytes(os.urandom(path.stat().st_size))
    assert node.boot().answer == first.answer


def test_a_server_that_dies_before_it_serves_has_its_caches_renewed(
    served: tuple[Node, Boot],
) -> None:
    node, first = served
    before = node.noted.count("loaded")
    with Server(node.command, node.environ, node.log()) as server:

        def kill_when_loaded() -> None:
            if node.noted.count("loaded") > before:
                server.process.kill()

        with pytest.raises(ProgramError):
            server.wait_until_healthy(kill_when_loaded)
    assert node.noted[-1] == "loaded"
    again = node.boot()
    assert again.answer == first.answer
    assert "caches.mended" in node.said
    assert node.noted[-1] == "serving"
