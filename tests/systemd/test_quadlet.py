"""Quadlet's unit, started by systemd with podman, on a machine that has both. vLLM is a stub."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Final

import pytest
from serving import free_port
from systemd.harness import INSTALL, MODEL, OPT, UNIT, Machine, booted, debian, mounts
from systemd.images import CHANGES

pytestmark = pytest.mark.long

PACKAGES: Final = ("podman", "crun", "catatonit")
NESTED: Final = ("--cap-add", "MKNOD", "--cap-add", "SYS_PTRACE", "--security-opt", "unmask=ALL")
"""What podman needs to start containers in one itself."""

PODMAN: Final = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
"""
STORAGE: Final = """\
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""
CHANGED: Final = " ".join(f"--change {shlex.quote(change)}" for change in CHANGES)
QUADLET: Final = f"""
rm -r /etc/systemd/system/shardboot@.service /etc/systemd/system/shardboot@.service.d
install -m 644 -D scripts/systemd/shardboot@.container /etc/containers/systemd/shardboot@.container
systemctl daemon-reload
tar --one-file-system -C / --exclude=./usr/share --exclude=./var -c . 2>/dev/null \\
    | podman import --quiet {CHANGED} - localhost/shardboot
"""
"""As the README says; the image is the machine itself."""

CONTAINER: Final = "systemd-shardboot_llama"

COPY_SECONDS: Final = 600.0
"""Without overlays every container is a copy of its image."""


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    room = tmp_path_factory.mktemp("quadlet")
    root, storage = room / "root", room / "storage"
    debian(root, *PACKAGES)
    (root / "etc/containers/containers.conf").write_text(PODMAN)
    (root / "etc/containers/storage.conf").write_text(STORAGE)
    drop_ins = root / "etc/containers/systemd/shardboot@.container.d"
    drop_ins.mkdir(parents=True)
    # No cgroups below a container's; and what an image would hold is mounted.
    lines = ["[Container]", "CgroupsMode=disabled", "HealthInterval=1s"]
    lines += [f"Volume={path}:{path}:ro" for path in (*mounts(), OPT)]
    (drop_ins / "here.conf").write_text("\n".join([*lines, ""]))
    storage.mkdir()
    with booted(root, room, [*NESTED, "--volume", f"{storage}:/var/lib/containers"]) as running:
        yield running
    shutil.rmtree(room)


def health(machine: Machine) -> str:
    """Return what the container says of its health; it fails unless it is well."""
    return machine.run("podman", "exec", CONTAINER, f"{OPT}/bin/shardboot", "health")


def test_started_is_what_is_healthy_and_what_is_killed_starts_again(machine: Machine) -> None:
    machine.type(INSTALL)
    machine.type(QUADLET)
    words = f"WORDS={MODEL} -tp 8 --port {free_port()}\n"
    (machine.root / "etc/shardboot/llama.env").write_text(words)
    machine.rules(warm_up=3)
    machine.type(f"systemctl start {UNIT}")
    assert "serving: saved on " in health(machine)
    machine.run("podman", "kill", "--signal", "KILL", CONTAINER)
    machine.wait_until(seconds=COPY_SECONDS, NRestarts="1", ActiveState="active")
    assert "serving: local on " in health(machine)
    machine.type(f"systemctl stop {UNIT}")
    shown = machine.show()
    assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success"), machine.log()
    assert machine.attempts() == ["save: local.absent", "local.hit"]
