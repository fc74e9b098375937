"""A machine that systemd has booted, in a container: shardboot and a stub vLLM lie in /opt/vllm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
from blackbox.harness import make_source
from container.image import PODMAN, ROOT, last_line, limits, make_way, podman
from serving import events_in

SUITE: Final = "trixie"
# An interpreter from elsewhere wants some of the libraries of Debian's own; vLLM wants libnuma1.
# `systemd-run --wait` speaks D-Bus.
PACKAGES: Final = "dbus,libexpat1,libffi8,libnuma1,libsqlite3-0,systemd-sysv"
# podman as a whole, with what it needs, would take as long as all the rest.
QUADLET: Final = """\
cd /tmp
apt-get --quiet=2 --option APT::Sandbox::User=root download podman
dpkg-deb --fsys-tarfile podman_*.deb | tar -C / -x ./usr/libexec/podman/quadlet
rm podman_*.deb
apt-get clean
rm -r /var/lib/apt/lists
"""
INIT: Final = (
    "/sbin/init",
    # Where the host has no unified cgroups, systemd 257 boots only if told to do without.
    "systemd.unified_cgroup_hierarchy=0",
    "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1",
)
SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1

OPT: Final = "/opt/vllm"
DATA: Final = "/var/lib/shardboot"
SHARED: Final = "/mnt/checkpoints"
MODEL: Final = "/models/llama"
UNIT: Final = "shardboot@llama"
SIDECAR: Final = "shardboot-sidecar"

PYTHON_STUB: Final = """\
#!/bin/sh
PYTHONPATH={tests}:{root} exec {python} {stub} {opt} "$@"
"""


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def mounts() -> list[Path]:
    """Return what holds our code, the environment and its interpreter; none inside another."""
    wanted = sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})
    return [path for path in wanted if not any(other in path.parents for other in wanted)]


def debian(root: Path, *more: str) -> None:
    """Make a Debian with systemd, podman's generator of units, and more packages.

    Skips, with the reason, where that cannot be.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and podman")
    for program in ("podman", "runc", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (scripts/packages)")
    if Path("/usr") in mounts():
        pytest.skip("the Python here lies in /usr, which would hide all that the Debian has there")
    # Nobody needs this Debian after a power loss.
    (root / "etc/dpkg/dpkg.cfg.d").mkdir(parents=True)
    (root / "etc/dpkg/dpkg.cfg.d/unsafe").write_text("force-unsafe-io\n")
    packages = ",".join([PACKAGES, *more])
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root)]
    for command in (bootstrap, ["chroot", str(root), "sh", "-euc", QUADLET]):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            said = last_line(done.stdout + done.stderr)
            pytest.skip(f"{command[0]} cannot make a Debian here: {said}")
    make_way(root, mounts())


class Machine:
    """One node. Its disks lie in a room: they outlive a reboot, and those who look at them."""

    def __init__(self, root: Path, room: Path) -> None:
        self.name = f"shardboot-systemd-{uuid.uuid4().hex}"
        self.root = root
        self.opt, self.data = room / "opt", room / "data"
        self.shared, self.models = room / "shared", room / "models"
        for directory in (self.opt / "bin", self.data, self.shared):
            directory.mkdir(parents=True)
        make_source(self.models / "llama")
        self.install()
        self.rules()

    def boot(self, options: Sequence[str] = ()) -> None:
        """Boot for the first time; skips, with the reason, where that cannot be.

        `options` are podman's.
        """
        disks = {self.opt: OPT, self.data: DATA, self.shared: SHARED, self.models: "/models"}
        words = [
            "--detach",
            "--systemd=always",
            "--network",
            "host",
            "--shm-size",
            "1g",
            *limits(),
        ]
        # The units' sandboxes are made of mounts.
        words += ["--cap-add", "SYS_ADMIN", *options]
        for outside, inside in disks.items():
            words += ["--volume", f"{outside}:{inside}"]
        for path in mounts():
            words += ["--volume", f"{path}:{path}:ro"]
        done = podman(
            "run", "--name", self.name, *words, "--rootfs", str(self.root.resolve()), *INIT
        )
        if done.returncode != 0:
            pytest.skip(f"podman cannot run systemd here: {last_line(done.stderr)}")
        self.wait_until_booted()
        said = self.run(f"{OPT}/bin/shardboot", "--version", check=False)
        if "version" not in said:
            pytest.skip(f"{sys.executable} cannot run in a container: {last_line(said)}")
        self._open_homes()

    def _open_homes(self) -> None:
        """Let units see this environment and its interpreter, in a home, or where files pass."""
        lines = ["[Service]", "ProtectHome=read-only"]
        lines += [f"BindReadOnlyPaths={path}" for path in mounts() if "tmp" in path.parts[1:3]]
        for unit in ("shardboot@.service", f"{SIDECAR}.service"):
            path = f"/etc/systemd/system/{unit}.d"
            self.type(f"mkdir -p {path}; printf '%s\\n' {shlex.join(lines)} >{path}/homes.conf")

    def install(self, programs: Mapping[str, str] = MappingProxyType({})) -> None:
        """Lay programs into /opt/vllm/bin, as links; a `vllm` that is not given is the stub."""
        stub = Path(__file__).with_name("stub_server.py")
        python = PYTHON_STUB.format(
            tests=ROOT / "tests", root=ROOT, python=binary("python"), stub=stub, opt=OPT
        )
        texts = {"python3-stub": python, "vllm": f"#!{OPT}/bin/python3-stub\n"}
        for name, text in texts.items():
            path = self.opt / "bin" / name
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        for name, target in {"shardboot": binary("shardboot"), **programs}.items():
            path = self.opt / "bin" / name
            path.unlink(missing_ok=True)
            path.symlink_to(target)

    def rules(self, **rules: object) -> None:
        """Say how the stub serves from now on."""
        (self.opt / "rules.json").write_text(json.dumps({"serve": rules}))

    def run(self, *words: str, check: bool = True, seconds: float = 2 * SECONDS) -> str:
        """Run a program in the machine; return what it said."""
        command = [*PODMAN, "exec", "--workdir", str(ROOT), self.name, *words]
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def type(self, text: str, *, check: bool = True, seconds: float = 2 * SECONDS) -> str:
        """Type something into a shell of the machine's root."""
        return self.run("sh", "-euc", text, check=check, seconds=seconds)

    def wait_until_booted(self) -> None:
        deadline = time.monotonic() + SECONDS
        # Until systemd listens, there is nobody to wait for.
        while "Failed to connect" in (state := self._state()):
            assert time.monotonic() < deadline, state
            time.sleep(POLL_SECONDS)
        assert state == "running", self.run("systemctl", "--failed")

    def _state(self) -> str:
        return self.run("systemctl", "is-system-running", "--wait", check=False).strip()

    def reboot(self) -> None:
        done = podman("restart", "--time", "30", self.name)
        assert done.returncode == 0, done.stderr
        self.wait_until_booted()

    def show(self, unit: str = UNIT) -> dict[str, str]:
        """Return all that systemd knows of a unit."""
        lines = self.run("systemctl", "show", unit).splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def wait_until(
        self, unit: str = UNIT, seconds: float = SECONDS, **wanted: str
    ) -> dict[str, str]:
        """Wait until what systemd says of a unit begins like this; return all that it says then."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.show(unit)
            if all(shown.get(name, "").startswith(value) for name, value in wanted.items()):
                return shown
            assert time.monotonic() < deadline, f"not {wanted}:\n{self.log(unit)}"
            time.sleep(POLL_SECONDS)

    def log(self, unit: str = UNIT) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    def events(self) -> list[str]:
        """Return what shardboot has said in the server's unit, by its event names."""
        return [event["event"] for event in events_in(self.log())]

    def processes(self, unit: str = UNIT) -> list[int]:
        """Return what runs in the unit, its main process first."""
        shown = self.show(unit)
        if not shown.get("ControlGroup"):
            return []
        # Of the older cgroups, systemd's own; of the unified ones, the only one.
        path = f"/sys/fs/cgroup/{{systemd,.}}{shown['ControlGroup']}/cgroup.procs"
        said = self.run("bash", "-c", f"cat {path} 2>/dev/null", check=False)
        pids = list(map(int, said.split()))
        return sorted(pids, key=lambda pid: pid != int(shown["MainPID"]))

    @property
    def ledger(self) -> list[dict[str, Any]]:
        path = self.data / "state" / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def attempts(self) -> list[str]:
        """Return why each boot began as it did."""
        entries = [entry for entry in self.ledger if entry["event"] == "attempt"]
        return [[*entry["after"], entry["reason"]][0] for entry in entries]

    def server(self, but: int = 0) -> int:
        """Return the pid of the server of the latest boot, once it is another one than `but`."""
        deadline = time.monotonic() + SECONDS
        while True:
            pids = [int(e["pid"]) for e in self.ledger if e["event"] == "attempt"]
            if pids and pids[-1] != but:
                return pids[-1]
            assert time.monotonic() < deadline, self.log()
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        podman("rm", "--force", "--time", "1", "--ignore", "--volumes", self.name)


@contextlib.contextmanager
def booted(root: Path, room: Path, options: Sequence[str] = ()) -> Iterator[Machine]:
    """Yield a machine that runs until the block ends."""
    machine = Machine(root, room)
    try:
        machine.boot(options)
        yield machine
    finally:
        machine.close()


def blocks(section: str) -> list[str]:
    """Return what a section of the README tells to type, a block each."""
    text = (ROOT / "README.md").read_text().partition(f"\n## {section}\n")[2]
    return re.findall(r"^```sh\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


INSTALL, START, START_SIDECAR = blocks("In a unit")
"""What a newcomer types once, for each server, and for what looks after them."""
