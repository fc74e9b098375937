"""Two real vLLMs in containers behind a real nginx, under load: an upgrade, and the way back.

Three boots and a save in all.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from container.harness import DATA, MODEL, surroundings
from container.image import PODMAN, ROOT, podman, surrounding
from front import Front
from models import make_model
from processes import RUN_SECONDS, Program
from serving import FLAGS, POLL_SECONDS, free_port
from steady_load import Load

pytestmark = [pytest.mark.container, pytest.mark.vllm]

NAME = "tiny"
TOKENS = 16


class Hall:
    """A machine with instances, a container each, which share one store."""

    def __init__(self, room: Path, image: str) -> None:
        self.room, self.image, self.mark = room, image, uuid.uuid4().hex
        self.ports = {instance: free_port() for instance in "ab"}
        make_model("dense", room / "model")
        for each in ("volume", "env", "bin"):
            (room / each).mkdir()
        program = room / "bin" / "podman"
        words = shlex.join([shutil.which(PODMAN[0]) or "", *PODMAN[1:]])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)

    def name(self, instance: str) -> str:
        return f"shardboot-{instance}-{self.mark}"

    def file(self, instance: str) -> Path:
        return self.room / "env" / f"{self.name(instance)}.env"

    def define(self, instance: str, core: int, served_name: str = NAME) -> tuple[str, str]:
        """Write an instance's file; return podman's words in it, and vLLM's."""
        held = (f"{self.room}/model:{MODEL}:ro", f"{self.room}/volume:{DATA}")
        options = [*surroundings(), "--init", "--env", f"VLLM_CPU_OMP_THREADS_BIND={core}"]
        options += [word for volume in held for word in ("--volume", volume)]
        words = [MODEL, *FLAGS, "--host", "127.0.0.1", "--port", str(self.ports[instance])]
        words += ["--served-model-name", served_name]
        told = shlex.join(options), shlex.join(words)
        text = f"IMAGE={self.image}\nPODMAN={told[0]}\nWORDS={told[1]}\n"
        self.file(instance).write_text(text)
        return told

    def start(self, instance: str, core: int) -> None:
        """Start one by hand, on the source, and wait until it serves."""
        options, words = map(shlex.split, self.define(instance, core))
        name = self.name(instance)
        options += ["--env", "SHARDBOOT_ON_MISS=source"]
        done = podman("run", "--detach", "--name", name, *options, self.image, *words)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + RUN_SECONDS
        while not self.is_healthy(instance):
            assert self.runs(instance), podman("logs", name).stderr
            assert time.monotonic() < deadline, podman("logs", name).stderr
            time.sleep(POLL_SECONDS)

    def is_healthy(self, instance: str) -> bool:
        url = f"http://127.0.0.1:{self.ports[instance]}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def runs(self, instance: str) -> bool:
        found = podman("inspect", "--format", "{{.State.Status}}", self.name(instance))
        return found.stdout.strip() == "running"

    def upgrade(self, front: Front) -> tuple[int, str]:
        """Upgrade from a to b; return the exit status and what was said."""
        ends = [f"{self.name(instance)}={port}" for instance, port in self.ports.items()]
        words = [
            "--nginx",
            front.file,
            "--env-dir",
            self.room / "env",
            "--lock",
            self.room / "lock",
        ]
        command = [ROOT / "scripts" / "rolling-upgrade", "podman", *ends, *words]
        path = f"{front.programs}:{self.room}/bin:{os.environ['PATH']}"
        log = self.room / "upgrade.log"
        with Program([*map(str, command)], surrounding() | {"PATH": path}, log) as program:
            status = program.process.wait(RUN_SECONDS)
        print(said := log.read_text().replace(self.mark, "…"))
        return status, said

    def close(self) -> None:
        for instance in self.ports:
            for name in (self.name(instance), f"{self.name(instance)}-checkpoint"):
                podman("rm", "--force", "--time", "1", "--ignore", name)


@pytest.fixture
def hall(tmp_path: Path, image: str) -> Iterator[Hall]:
    made = Hall(tmp_path, image)
    yield made
    made.close()
    shutil.rmtree(tmp_path)


def test_no_request_is_lost_on_the_way_back_nor_on_an_upgrade(hall: Hall) -> None:
    cores = os.cpu_count() or 1
    front = Front(hall.room / "front", f"127.0.0.1:{hall.ports['a']}")
    hall.start("a", core=0)
    with front.start(), Load(front.port, NAME, TOKENS, rest=1.0, fresh=1, stream=2) as load:
        load.wait_for(4)
        hall.define("b", 1 % cores, served_name="other")
        status, said = hall.upgrade(front)
        assert status == 1, said
        assert "1/4 checkpoint: local.hit: " in said
        assert "failed at 3/4 check: " in said
        assert hall.runs("a")
        assert not hall.runs("b")
        load.wait_for(4)
        print(f"after the way back: answered {dict(load.answered)}, lost {load.lost}")

        hall.define("b", 1 % cores)
        status, said = hall.upgrade(front)
        assert status == 0, said
        load.wait_for(4)
        load.stop()
        print(f"after the upgrade: answered {dict(load.answered)}, lost {load.lost}")
        assert load.lost == []
        assert not hall.runs("a")
        assert hall.runs("b")
