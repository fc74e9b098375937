"""Real `vllm serve` on the source, a checkpoint saved on the way; and what may befall it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from poison import flip_one_value
from processes import Program, descendants, run
from serving import FLAGS, Server, decision, environment

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.insight.timeline import timelines
from entrypoint.state.ledger import Ledger
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections

pytestmark = pytest.mark.vllm

PROMPT = "The first word"
SHARDBOOT = str(Path(sys.executable).with_name("shardboot"))
SECONDS = 300.0


class Node:
    """A host with a model that its boots tee."""

    def __init__(self, room: Path, model: Path, tp: int) -> None:
        self.room, self.model = room, model
        self.store, self.state = room / "checkpoints", room / "state"
        self.words = [str(model), *FLAGS, "-tp", str(tp)]
        self.environ = environment(tp) | {
            "SHARDBOOT_LOCAL_DIR": str(self.store),
            "SHARDBOOT_STATE_DIR": str(self.state),
            "SHARDBOOT_LOG_FORMAT": "json",
            "SHARDBOOT_ON_MISS": "tee",
        }
        self.count = 0

    def log(self) -> Path:
        self.count += 1
        return self.room / f"{self.count}.log"

    def serve(self, *prefix: str) -> Server:
        return Server([*prefix, SHARDBOOT, "serve", *self.words], self.environ, self.log())

    def ask(self, command: str, **settings: str) -> Any:
        more = {f"SHARDBOOT_{name.upper()}": word for name, word in settings.items()}
        log = self.log()
        line = [SHARDBOOT, command, "--format", "json", *self.words]
        status, said = run(line, self.environ | more, log)
        assert status == 0, log.read_text()
        return json.loads(said)

    def events(self) -> list[str]:
        return [str(entry.get("event")) for entry in Ledger(self.state).entries()]

    def wait_for(self, event: str, server: Server) -> None:
        deadline = time.monotonic() + SECONDS
        while event not in self.events():
            assert server.process.poll() is None, server.last_lines()
            assert time.monotonic() < deadline, server.last_lines()
            time.sleep(0.1)

    def publish(self, shared: Path) -> None:
        """Run a sidecar until it has published what this host has saved."""
        log = self.log()
        words = ["--publish", "--shared", str(shared), "--listen", "127.0.0.1:0"]
        words += ["--watch-interval", "1s", "--scrub-interval", "never", "--prove-idle", "no"]
        with Program([SHARDBOOT, "sidecar", *words], self.environ, log) as sidecar:
            deadline = time.monotonic() + SECONDS
            while '"push.done"' not in (said := log.read_text()):
                assert sidecar.process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.1)

    def staged(self) -> list[Path]:
        return [*(self.store / ".staging").iterdir()]


def programs(server: Server) -> list[bytes]:
    """Return what tells apart how vLLM's processes were started: a fork has its parent's."""
    first, titled = server.process.pid, b"VLLM::"
    others = [p for p in descendants(first) if titled in Path(f"/proc/{p}/cmdline").read_bytes()]
    return [Path(f"/proc/{pid}/auxv").read_bytes() for pid in (first, *others)]


def manifest_in(store: Path) -> Manifest:
    (path,) = store.glob(f"*/{MANIFEST}")
    return manifests.decode(path.read_bytes())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    room = tmp_path_factory.mktemp("tee")
    make_model("dense", room / "model")
    yield room / "model"
    shutil.rmtree(room)


@pytest.fixture
def node(tmp_path: Path, model: Path) -> Callable[[int], Node]:
    return lambda tp: Node(tmp_path, model, tp)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_is_saved_on_the_way_is_what_a_save_makes_and_the_next_boot_serves_it(
    node: Callable[[int], Node], tp: int
) -> None:
    here = node(tp)
    with here.serve() as server:
        server.wait_until_healthy()
        first = server.complete(str(here.model), PROMPT)
        here.wait_for("tee.done", server)
        found = programs(server)
    assert decision(server.log) == ("plain", "local.absent")
    # vLLM's first process has forked the engine, and that the workers.
    assert len(found) >= tp + 1
    assert len(set(found)) == 1
    assert "copied, and written while vLLM goes on" in server.log.read_text()
    assert len(set(first.tokens)) > 3
    made = manifest_in(here.store)
    assert here.staged() == []
    [told] = timelines(Ledger(here.state).entries(), (), lambda _: False, time.time())
    assert {"imports", "weights", "process"} <= {phase.name for phase in told.phases}
    assert [phase.name for phase in told.beside] == ["tee"]
    with here.serve() as server:
        server.wait_until_healthy()
        assert server.complete(str(here.model), PROMPT) == first
    assert decision(server.log) == ("local", "local.hit")
    here.ask("save", local_dir=str(here.room / "saved"))
    saved = manifest_in(here.room / "saved")
    assert (saved.key, saved.state, saved.source) == (made.key, made.state, made.source)


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [("int8", "weight_scale"), pytest.param("moe", "w2_weight", marks=pytest.mark.long)],
)
def test_what_must_be_proved_is_proved_by_the_load_that_serves_it_for_all_nodes_or_not_served(
    tmp_path: Path, kind: str, spoilt: str
) -> None:
    make_model(kind, tmp_path / "model")
    (tmp_path / "good").mkdir()
    here = Node(tmp_path / "good", tmp_path / "model", 2)
    with here.serve() as server:
        server.wait_until_healthy()
        first = server.complete(str(here.model), PROMPT)
        here.wait_for("tee.done", server)
    assert len(set(first.tokens)) > 3
    shutil.copytree(here.room, tmp_path / "bad", symlinks=True)
    made = manifest_in(here.store)
    assert made.proof is None
    with here.serve() as server:
        server.wait_until_healthy()
        assert server.complete(str(here.model), PROMPT) == first
    assert decision(server.log) == ("local", "local.hit")
    assert "loads to its source's state" in server.log.read_text()
    proved = Proofs(here.state).find(made)
    assert proved is not None
    assert (proved["in_place"], proved["unprobed"]) == (True, [])

    (tmp_path / "shared").mkdir()
    here.publish(tmp_path / "shared")
    (tmp_path / "far").mkdir()
    far = Node(tmp_path / "far", here.model, 2)
    far.environ["SHARDBOOT_SHARED"] = str(tmp_path / "shared")
    with far.serve() as server:
        server.wait_until_healthy()
        assert server.complete(str(here.model), PROMPT) == first
    assert decision(server.log) == ("shared", "shared.hit")
    assert "proved" not in far.events()
    assert manifest_in(far.store) == made._replace(proof=proved)

    there = Node(tmp_path / "bad", here.model, 2)
    wrong = flip_one_value(there.store / made.name, spoilt)
    for path in (there.state / "awaited").iterdir():
        path.rename(path.with_name(path.name.replace(made.content, wrong.content)))
    with there.serve() as server:
        server.wait_until_healthy()
        assert server.complete(str(here.model), PROMPT) == first
    assert decision(server.log) == ("local", "local.hit")
    assert "Loading the source instead" in server.log.read_text()
    rejected = Rejections(there.state).find(wrong.content)
    assert rejected is not None
    assert rejected.kind == "unproven"
    assert (
        f"source's state with vLLM {made.key.vllm}: rank 0 after model.layers.0." in rejected.reason
    )
    assert Proofs(there.state).find(wrong) is None
    plan = there.ask("plan")
    assert (plan["action"], plan["reason"]) == ("serve-source", "local.unproven")


NO_MEMORY = "import entrypoint.headroom\nentrypoint.headroom.free_bytes = lambda: 0\n"


@pytest.mark.long
def test_where_host_memory_is_short_a_worker_writes_first(node: Callable[[int], Node]) -> None:
    here = node(2)
    (here.room / "sitecustomize.py").write_text(NO_MEMORY)
    here.environ["PYTHONPATH"] = str(here.room)
    here.environ["SHARDBOOT_SINGLE_IMPORT"] = "no"
    with here.serve() as server:
        server.wait_until_healthy()
        assert "written first, since host memory is short" in server.log.read_text()
        here.wait_for("tee.done", server)
        found = programs(server)
        assert len(set(found)) == len(found) > 2
    assert here.ask("plan")["reason"] == "local.hit"


def strace(injection: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: no way to fail in the midst of a tee")
    trace = f"trace={injection.partition(':')[0]}"
    return [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-o",
        "/dev/null",
        "-e",
        trace,
        "-e",
        f"inject={injection}",
    ]


@pytest.mark.long
def test_a_full_disk_costs_the_checkpoint_and_never_the_server(
    node: Callable[[int], Node],
) -> None:
    here = node(2)
    # Only shard files are given their room beforehand.
    with here.serve(*strace("fallocate:error=ENOSPC")) as server:
        server.wait_until_healthy()
        here.wait_for("tee.failed", server)
        assert len(set(server.complete(str(here.model), PROMPT).tokens)) > 3
        (failed,) = (e for e in Ledger(here.state).entries() if e.get("event") == "tee.failed")
        assert failed["reason"] == "space.short"
        said = server.log.read_text()
    assert said.count("no checkpoint is saved on the way") == 1
    assert here.staged() == []
    assert here.ask("plan")["action"] == "tee"


@pytest.mark.long
def test_a_server_killed_on_the_way_leaves_nothing_and_the_next_one_begins_anew(
    node: Callable[[int], Node],
) -> None:
    here = node(2)
    # Only shard files are given their room beforehand: a worker dies with nothing written.
    with here.serve(*strace("fallocate:signal=SIGKILL")) as server:
        # vLLM ends when a worker has died.
        server.process.wait(SECONDS)
    (left,) = here.staged()
    assert [*here.store.glob(f"*/{MANIFEST}")] == []
    with here.serve() as server:
        server.wait_until_healthy()
        here.wait_for("tee.done", server)
        assert not left.exists()
    assert here.ask("plan")["reason"] == "local.hit"


def test_by_an_answer_that_does_not_hold_any_more_nothing_is_saved(
    node: Callable[[int], Node],
) -> None:
    here = node(1)
    key = here.ask("plan")["key"]
    (path,) = (here.state / "memory" / "resolutions").glob("*.json")
    stale = path.read_text().replace('"dtype":"bfloat16"', '"dtype":"float16"')
    path.write_text(stale)
    assert here.ask("plan")["key"] == key | {"dtype": "float16"}
    with here.serve() as server:
        server.wait_until_healthy()
        here.wait_for("tee.failed", server)
    assert [*here.store.glob(f"*/{MANIFEST}")] == []
    assert here.ask("plan")["key"] == key
