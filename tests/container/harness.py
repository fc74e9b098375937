"""Containers that never outlive their test, of the image that the Dockerfile makes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from container.image import PODMAN, limits, podman, surrounding, volumes
from models import make_model
from processes import descendants, start_of
from serving import FLAGS, Server, environment

MODEL: Final = "/models/tiny"
DATA: Final = "/var/lib/shardboot"
GRACE_SECONDS: Final = 60
RUN_SECONDS: Final = 60


def surroundings() -> list[str]:
    """Return podman's words for all that vLLM needs to run from this environment."""
    words = ["--network", "host", "--shm-size", "256m", *limits(), *volumes()]
    for name, value in environment().items():
        if name.startswith("VLLM_") or name == "HF_HUB_OFFLINE":
            words += ["--env", f"{name}={value}"]
    return words


def once(image: str, *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a container to its end, which comes within a minute; `options` are podman's."""
    bound = ("--timeout", str(RUN_SECONDS))
    return podman("run", "--rm", *bound, *surroundings(), *options, image, *words)


class Host:
    """A machine with an image, a model, and one volume for stores and state."""

    def __init__(self, room: Path, image: str) -> None:
        self.room = room
        self.image = image
        self.model = room / "model"
        self.volume = room / "volume"
        make_model("dense", self.model)
        self.volume.mkdir()
        self.count = 0

    def start(self, *words: str, options: Sequence[str] = ()) -> Container:
        """Start a container; `options` are podman's, `words` come before the model."""
        self.count += 1
        held = (f"{self.model}:{MODEL}:ro", f"{self.volume}:{DATA}")
        volumes = [word for volume in held for word in ("--volume", volume)]
        return Container(
            [*surroundings(), *volumes, *options],
            [self.image, *words, MODEL, *FLAGS],
            self.room / f"{self.count}.log",
        )


class Container(Server):
    """`podman run` in the foreground: its output and exit status are the container's."""

    def __init__(self, options: Sequence[str], words: Sequence[str], log: Path) -> None:
        self.name = f"shardboot-test-{uuid.uuid4().hex}"
        self._main_pid = 0
        command = [*PODMAN, "run", "--rm", "--name", self.name, *options, *words]
        super().__init__(command, surrounding(), log)

    def main_pid(self) -> int:
        """Return the pid that the container's first process has on this machine."""
        if not self._main_pid:
            done = podman("inspect", "--format", "{{.State.Pid}}", self.name)
            assert done.returncode == 0, done.stderr
            self._main_pid = int(done.stdout)
        return self._main_pid

    def family(self) -> dict[int, str]:
        """Return all processes of the container, as this machine knows them, with start times."""
        main = self.main_pid()
        start = start_of(main)
        assert start
        return descendants(main) | {main: start}

    def health(self) -> str:
        """Run the image's HEALTHCHECK; return what it said of a server that is well."""
        done = podman("healthcheck", "run", self.name)
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = json.loads(podman("inspect", self.name).stdout)
        said: str = found["State"]["Health"]["Log"][-1]["Output"]
        return said

    def orphan(self, count: int) -> None:
        """Leave that many ended processes to the container's first one."""
        script = "for n in $(seq $1); do true & done"
        done = podman("exec", self.name, "sh", "-c", script, "sh", str(count))
        assert done.returncode == 0, done.stderr

    def podman_stop(self, seconds: int = GRACE_SECONDS) -> float:
        """Do as its name says; return the seconds until the first process was gone."""
        process = Path("/proc", str(self.main_pid()))
        started = time.monotonic()
        command = [*PODMAN, "stop", "--time", str(seconds), self.name]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=surrounding()) as stopping:
            while process.exists() and time.monotonic() < started + 2 * GRACE_SECONDS:
                time.sleep(0.01)
            took = time.monotonic() - started
        assert stopping.returncode == 0
        self.process.wait(GRACE_SECONDS)
        return took

    def stop(self) -> None:
        # Whatever became of `podman run`, which is not the container's parent.
        podman("rm", "--force", "--time", "1", "--ignore", self.name)
        super().stop()


def zombies(pid: int) -> int:
    """Count the children of a process that have ended, and that it has not waited for."""
    count = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                # The name, in brackets, may hold anything; state and parent follow (proc(5)).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                count += fields[0] == "Z" and int(fields[1]) == pid
    return count
