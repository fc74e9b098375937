"""The files that start a container, tried with an image that has no more than the machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import pytest
from container.image import PODMAN, ROOT, limits, podman
from systemd.harness import DATA, OPT, POLL_SECONDS, SECONDS, Machine, binary, mounts

SERVICE: Final = "2000:2000"
CHANGES: Final = (
    f'ENTRYPOINT ["{OPT}/bin/shardboot", "enter"]',
    f"ENV PATH={OPT}/bin:/usr/bin:/bin",
    f"ENV SHARDBOOT_USER={SERVICE}",
)
OF_SYSTEMD: Final = re.compile(r"--(cidfile|replace|rm|cgroups|sdnotify)\b.*")
"""What only a podman that systemd has started takes, or one newer than this machine's may."""


@contextlib.contextmanager
def imported(machine: Machine) -> Iterator[str]:
    """Make an image of a machine, with what our Dockerfile says of one, and yield its tag."""
    tag = f"localhost/shardboot-systemd:{uuid.uuid4().hex}"
    changes = [word for change in CHANGES for word in ("--change", change)]
    archive = machine.root.with_suffix(".tar")
    packed = ["tar", "--one-file-system", "-C", str(machine.root), "-cf", str(archive), "."]
    subprocess.run(packed, check=True)
    done = podman("import", "--quiet", *changes, str(archive), tag)
    archive.unlink()
    assert done.returncode == 0, done.stderr
    try:
        yield tag
    finally:
        podman("rmi", "--force", tag)


def volumes(machine: Machine) -> dict[str, str]:
    """Return what an image would hold, and is mounted instead."""
    return {f"{path}": f"{path}:ro" for path in mounts()} | {f"{machine.opt}": f"{OPT}:ro"}


class Container:
    """What podman, or who calls it, has started; it ends with the block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--time", "1", "--ignore", "--volumes", self.name)

    def run(self, *words: str) -> str:
        """Run a command of ours in it."""
        done = podman("exec", self.name, f"{OPT}/bin/shardboot", *words)
        assert done.returncode == 0, done.stdout + done.stderr + self.log()
        return done.stdout

    def log(self) -> str:
        done = podman("logs", self.name)
        return done.stdout + done.stderr

    def is_healthy(self) -> bool:
        return podman("healthcheck", "run", self.name).returncode == 0

    def wait_until_restarted(self) -> None:
        """Wait until it runs again, after vLLM was killed."""
        deadline = time.monotonic() + SECONDS
        while self._inspected("{{.RestartCount}} {{.State.Status}}") != "1 running":
            assert time.monotonic() < deadline, self.log()
            time.sleep(POLL_SECONDS)

    def pid(self) -> int:
        """Return the pid that vLLM has on this machine: the first child of podman's init."""
        init = self._inspected("{{.State.Pid}}")
        return int(Path(f"/proc/{init}/task/{init}/children").read_text().split()[0])

    def _inspected(self, form: str) -> str:
        return podman("inspect", "--format", form, self.name).stdout.strip()

    def status(self) -> dict[str, list[str]]:
        """Return what the kernel says of vLLM."""
        lines = Path(f"/proc/{self.pid()}/status").read_text().splitlines()
        return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def need_init() -> None:
    if shutil.which("catatonit") is None:
        pytest.skip("catatonit, podman's init, is not installed (scripts/packages)")


def as_quadlet(machine: Machine, unit: str, image: str) -> Container:
    """Start the container that a unit of quadlet's would start for `llama.env`."""
    need_init()
    (line,) = re.findall(r"^ExecStart=/usr/bin/podman run (.*)$", unit, re.MULTILINE)
    environment = machine.root / "etc/shardboot/llama.env"
    container = Container(f"shardboot-quadlet-{uuid.uuid4().hex}")
    places = {
        "systemd-%p_%i": container.name,
        "/etc/shardboot/%i.env": str(environment),
        f"{DATA}:": f"{machine.data}:",
        "/models:/models": f"{machine.models}:/models",
        "localhost/shardboot": image,
    }
    for theirs, ours in places.items():
        line = line.replace(theirs, ours, 1)
    options, _, _ = line.partition(" $WORDS")
    *options, tag = (word for word in shlex.split(options) if not OF_SYSTEMD.match(word))
    (words,) = re.findall(r"^WORDS=(.*)$", environment.read_text(), re.MULTILINE)
    options += [word for pair in volumes(machine).items() for word in ("-v", ":".join(pair))]
    done = podman("run", *options, *limits(), tag, *words.split())
    assert done.returncode == 0, done.stderr
    return container


def composed(
    machine: Machine, image: str, words: str, *options: str, **settings: str
) -> tuple[Container, Container]:
    """Have podman-compose start what the compose file says; `options` are its own.

    Returns the server's container and the sidecar's, which has these `settings`, and is there only
    with its profile.
    """
    need_init()
    name = f"shardboot-compose-{uuid.uuid4().hex}"
    both = {
        "image": image,
        "volumes": [":".join(pair) for pair in volumes(machine).items()],
        "ulimits": {"nofile": 1024, "nproc": 1024},
    }
    server = {"container_name": name, "command": words.split(), "network_mode": "host"}
    sidecar = {"container_name": f"{name}-sidecar", "environment": settings}
    # No port is published by a container that has the machine's own network; and there is no GPU.
    text = json.dumps({"services": {"vllm": both | server, "sidecar": both | sidecar}})
    text = text.replace('"network_mode"', '"ports": !reset [], "deploy": !reset {}, "network_mode"')
    override = machine.root.with_name("override.yaml")
    override.write_text(text)
    program = binary("podman-compose")
    if not os.access(program, os.X_OK):
        pytest.skip("podman-compose is not installed (scripts/setup)")
    environ = {"DATA": machine.data, "MODELS": machine.models}
    done = subprocess.run(
        [
            *(program, f"--podman-args={' '.join(PODMAN[1:])}", "--in-pod", "false", *options),
            *("-f", ROOT / "scripts/compose.yaml", "-f", override, "up", "--detach"),
        ],
        env=os.environ | {name: str(value) for name, value in environ.items()},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Container(name), Container(f"{name}-sidecar")
