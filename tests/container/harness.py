"""A base image made of Debian alone, and containers that never outlive their test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from models import make_model
from serving import FLAGS, Server, environment

ROOT: Final = Path(__file__).parents[2]
PODMAN: Final = ("podman", "--runtime", "runc")
SUITE: Final = "bookworm"
# vLLM's kernels want libnuma1; an interpreter from elsewhere wants the libraries of Debian's own.
PACKAGES: Final = "libnuma1,python3"
MODEL: Final = "/models/tiny"
DATA: Final = "/var/lib/shardboot"
GRACE_SECONDS: Final = 60
PREFLIGHT: Final = "import ctypes, sqlite3, ssl, entrypoint.cli"


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def mounts() -> list[Path]:
    """Return what holds our code, the environment and its interpreter; none inside another."""
    wanted = sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})
    return [path for path in wanted if not any(other in path.parents for other in wanted)]


def surroundings() -> list[str]:
    """Return podman's words for all that vLLM needs to run from this environment."""
    words = ["--network", "host", "--shm-size", "256m"]
    # podman's own limits are far above these, which takes CAP_SYS_RESOURCE; a sandbox may lack it.
    words += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    for path in mounts():
        words += ["--volume", f"{path}:{path}:ro"]
    for name, value in environment().items():
        if name.startswith("VLLM_") or name == "HF_HUB_OFFLINE":
            words += ["--env", f"{name}={value}"]
    return words


@contextlib.contextmanager
def base_image(room: Path) -> Iterator[str]:
    """Make an image like the README's, but with the environment mounted, and yield its tag.

    Skips, with the reason, where that cannot be.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and podman")
    for program in ("podman", "runc", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (scripts/packages)")
    base, archive = room / "base", room / "base.tar"
    tag = f"localhost/shardboot-test:{os.getpid()}"
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(base)]
    done = subprocess.run(bootstrap, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"debootstrap cannot work here: {last_line(done.stdout + done.stderr)}")
    for path in mounts():
        for parent in reversed(path.parents[:-1]):
            inside = base / parent.relative_to("/")
            inside.mkdir(exist_ok=True)
            # The service user passes here, and root's home is closed to it.
            inside.chmod(inside.stat().st_mode | 0o755)
    subprocess.run(["tar", "-C", base, "-cf", archive, "."], check=True)
    entrypoint = json.dumps([binary("shardboot"), "enter"])
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    changes = ["--change", f"ENTRYPOINT {entrypoint}", "--change", f"ENV PATH={search}"]
    made = [*PODMAN, "import", "--quiet", *changes, str(archive), tag]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(room)
    try:
        run = [*PODMAN, "run", "--rm", "--user", "2000:2000", *surroundings()]
        run += ["--entrypoint", binary("python"), tag, "-c", PREFLIGHT]
        done = subprocess.run(run, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{sys.executable} cannot run in a container: {last_line(done.stderr)}")
        yield tag
    finally:
        subprocess.run([*PODMAN, "rmi", "--force", tag], check=False, stdout=subprocess.DEVNULL)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


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
            [*surroundings(), *volumes, "--env", "SHARDBOOT_LOG_FORMAT=json", *options],
            [self.image, *words, MODEL, *FLAGS],
            self.room / f"{self.count}.log",
        )


class Container(Server):
    """`podman run` in the foreground: its output and exit status are the container's."""

    def __init__(self, options: Sequence[str], words: Sequence[str], log: Path) -> None:
        self.name = f"shardboot-test-{uuid.uuid4().hex}"
        command = [*PODMAN, "run", "--rm", "--name", self.name, *options, *words]
        super().__init__(command, os.environ, log)

    def main_pid(self) -> int:
        """Return the pid that the container's first process has on this machine."""
        show = [*PODMAN, "inspect", "--format", "{{.State.Pid}}", self.name]
        done = subprocess.run(show, check=True, capture_output=True, text=True)
        return int(done.stdout)

    def podman_stop(self) -> float:
        """Do as its name says; return the seconds until the first process was gone."""
        process = Path("/proc", str(self.main_pid()))
        started = time.monotonic()
        command = [*PODMAN, "stop", "--time", str(GRACE_SECONDS), self.name]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as stopping:
            while process.exists() and time.monotonic() < started + 2 * GRACE_SECONDS:
                time.sleep(0.01)
            seconds = time.monotonic() - started
        assert stopping.returncode == 0
        self.process.wait(GRACE_SECONDS)
        return seconds

    def stop(self) -> None:
        # Whatever became of `podman run`, which is not the container's parent.
        remove = [*PODMAN, "rm", "--force", "--time", "1", "--ignore", self.name]
        subprocess.run(remove, check=False, capture_output=True)
        super().stop()
