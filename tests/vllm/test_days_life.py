"""A day of two hosts that share a store: a release, a full disk, bit rot, and no store for a while.

Real vLLM on both, each in a network and with a name of its own; JuiceFS, mounted once for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from juicefs import another_mount, mounted
from models import fine_tune, make_model
from processes import Program, run
from releases import serve
from serving import FLAGS, environment, events

from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.inspect import read_manifest, verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.store import lock
from entrypoint.store.directory import DirectoryStore

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes networks and mounts"),
]

SECONDS = 240.0
PORT = "8000"
"""Each host has a network of its own."""

OFTEN = ("--watch-interval", "1s", "--scrub-interval", "2s", "--prove-idle", "no")
COLLECTS = ("--collect-interval", "1s", "--grace", "0s", "--publish")
"""What A's sidecar does as well: its disk is small."""

ASK = """\
import json, sys, urllib.request
body = {"model": sys.argv[1], "prompt": "The first word", "max_tokens": 16, "temperature": 0}
data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}/v1/completions", data, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
"""


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Host:
    """A machine with its own name, network, disk and state, and a mount of the shared store."""

    def __init__(self, room: Path, name: str, shared: Path, model: Path) -> None:
        self.room, self.name, self.shared, self.model = room / name, name, shared, model
        self.local, self.state = self.room / "checkpoints", self.room / "state"
        self.local.mkdir(parents=True)
        self.store = DirectoryStore(self.local)
        script = f"ip link set lo up && hostname {name} && exec sleep infinity"
        line = ["unshare", "--net", "--uts", "sh", "-c", script]
        self.on = Program(line, os.environ, self.room / "on.log")
        until(lambda: self.said("hostname") == name, f"{name} has no name")

    def said(self, *command: str) -> str:
        """Return what a program on this host says."""
        line = self.inside(*command)
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.on.process.pid), "--net", "--uts", *command]

    @property
    def environ(self) -> dict[str, str]:
        return environment(tp=1) | {
            "SHARDBOOT_LOCAL_DIR": str(self.local),
            "SHARDBOOT_STATE_DIR": str(self.state),
            "SHARDBOOT_SHARED": str(self.shared),
            "SHARDBOOT_RESERVE_BYTES": "0",
            # Nobody knows these hosts' names.
            "VLLM_HOST_IP": "127.0.0.1",
        }

    def shardboot(self, command: str, *words: str) -> str:
        """Run a command of ours to its end; return what it printed."""
        log = self.room / f"{command}.log"
        program = str(Path(sys.executable).with_name("shardboot"))
        status, said = run(self.inside(program, command, *words), self.environ, log)
        assert status == 0, log.read_text()
        return said

    def start(self, name: str, *words: str) -> Program:
        program = str(Path(sys.executable).with_name("shardboot"))
        return Program(self.inside(program, *words), self.environ, self.room / f"{name}.log")

    def plan(self) -> tuple[str, str]:
        """Return what a boot would do now, and why."""
        found: Any = json.loads(self.shardboot("plan", "--format", "json", *self.words))
        return found["action"], found["reason"]

    @property
    def words(self) -> tuple[str, ...]:
        return (str(self.model), *FLAGS)

    @property
    def boots(self) -> int:
        """How many have left a status."""
        return len([*self.state.glob("status/*.json")])

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[str]:
        """Boot; yield the answer of the server, which runs until the block ends."""
        before = self.boots
        with self.start(name, "serve", *self.words, "--port", PORT):
            until(lambda: self.boots > before, "no boot has a status")
            self.shardboot("wait", "--timeout", f"{SECONDS:.0f}s")
            yield self.said(sys.executable, "-c", ASK, str(self.model), PORT)

    def has_said(self, name: str, event: str, *texts: str) -> bool:
        said = events(self.room / f"{name}.log")
        about = [str(each["message"]) for each in said if each["event"] == event]
        return any(all(text in message for text in texts) for message in about)

    def wait_for(self, name: str, event: str, *texts: str) -> None:
        log = self.room / f"{name}.log"
        until(lambda: self.has_said(name, event, *texts), f"{event}: {texts} in {log}")


@contextlib.contextmanager
def small_disk(point: Path, size: int) -> Iterator[None]:
    point.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False)


def newest(store: DirectoryStore) -> Manifest:
    found = [read_manifest(store.path(name)) for name in store.names()]
    return max(found, key=lambda manifest: manifest.created_at)


def next_release(host: Host, manifest: Manifest) -> Manifest:
    """Publish what a later save of another content would be, from this host's mount."""
    key = manifest.key._replace(model=digest_bytes(b"the next content"))
    later = manifest._replace(name="next", key=key, created_at="2999-01-01T00:00:00+00:00")
    with DirectoryStore(host.shared).stage("next") as staging:
        for entry in later.files:
            data = (host.store.path(manifest.name) / entry.path).read_bytes()
            staging.write_file(entry.path, data)
        staging.commit(later)
    return later


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, Callable[[], Any]]]:
    """Two hosts, and how to mount the second one's shared store."""
    if subprocess.run(["unshare", "--net", "--uts", "true"], check=False).returncode:
        pytest.skip("no network may be made here")
    model, point = tmp_path / "model", tmp_path / "mount-b"
    make_model("dense", model)
    point.mkdir()
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(mounted(tmp_path / "juicefs"))
        (nodes.one / "store").mkdir()
        # Two checkpoints have room there, and half of another.
        stack.enter_context(small_disk(tmp_path / "a" / "checkpoints-disk", int(size * 2.5)))
        made = []
        for name, shared in (("a", nodes.one / "store"), ("b", point / "store")):
            made.append(Host(tmp_path, name, shared, model))
            stack.enter_context(made[-1].on)
        made[0].local = tmp_path / "a" / "checkpoints-disk"
        made[0].store = DirectoryStore(made[0].local)
        yield made[0], made[1], lambda: another_mount(nodes, point)


def test_a_days_life(hosts: tuple[Host, Host, Callable[[], Any]], tmp_path: Path) -> None:
    a, b, mounting = hosts
    with contextlib.ExitStack() as day:
        away = contextlib.ExitStack()
        day.callback(away.close)
        away.enter_context(mounting())
        # Yesterday's release: both hosts have it, and have served it.
        a.shardboot("save", *a.words)
        a.shardboot("push", *a.words)
        until(lambda: DirectoryStore(b.shared).names(), "what A pushed is not seen on B")
        b.shardboot("pull", *b.words)
        old = newest(b.store)
        for host in (a, b):
            serve(host.state, old, pid=1, pid_start=0)
        day.enter_context(a.start("sidecar", "sidecar", *OFTEN, *COLLECTS))
        day.enter_context(b.start("sidecar", "sidecar", *OFTEN, "--collect-interval", "never"))

        # A release: what A has saved it publishes, and its disk is full, until the old one goes.
        fine_tune(a.model, tmp_path / "tuned")
        for path in (tmp_path / "tuned").iterdir():
            path.replace(a.model / path.name)
        with a.serving("boot") as answer:
            new = newest(a.store)
            a.wait_for("sidecar", "push.done", new.name)
            a.wait_for("sidecar", "collect.gone", old.name, "superseded")
            assert a.store.names() == [new.name]
            b.wait_for("sidecar", "copy.done", new.name)
        assert not a.has_said("boot", "space.evicted")
        assert new.key.model != old.key.model

        # B restarts as a hit, with A's answer; a bit rots under its server, and is repaired.
        assert b.plan() == ("reuse", "local.hit")
        with b.serving("boot") as again:
            assert again == answer
            assert b.has_said("boot", "local.hit", new.name)
            assert not b.has_said("boot", "copy.done")
            directory = b.store.path(new.name)
            flip(next(directory.glob("*.safetensors")))
            b.wait_for("sidecar", "scrub.damaged", new.name)
            b.wait_for("sidecar", "repair.done", new.name)
            assert verify_deep(directory, new, new.layout.ranks) == ()
            assert not lock.is_free(directory)
            b.shardboot("health")

            # The store goes away from B: all goes on, and what comes meanwhile is caught up with.
            away.close()
            b.wait_for("sidecar", "job.failed", "look-far")
            later = next_release(a, new)
            b.shardboot("health")
            assert b.plan() == ("reuse", "local.hit")
            away.enter_context(mounting())
            b.wait_for("sidecar", "copy.done", later.name)
        # There is room for it on A, since another one has gone.
        a.wait_for("sidecar", "copy.done", later.name)
        assert b.plan() == ("reuse", "local.hit")
