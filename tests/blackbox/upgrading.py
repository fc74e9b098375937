"""A host with two instances of a stub, and the real scripts/rolling-upgrade between them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from answers import NAME
from front import Front
from serving import free_port

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = ROOT / "scripts" / "rolling-upgrade"
FAKE: Final = Path(__file__).with_name("fake_host.py")
SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.02

Kind = Literal["systemd", "podman"]


@dataclass(frozen=True)
class Upgraded:
    """How one run ended."""

    status: int
    said: str

    @property
    def last(self) -> str:
        return self.said.splitlines()[-1]

    @property
    def steps(self) -> list[str]:
        """Which steps were told of, each once."""
        told = [line.split(": ")[1] for line in self.said.splitlines()]
        return list(dict.fromkeys(step for step in told if step[:2] in {f"{n}/" for n in "1234"}))


class World:
    """OLD is `a`, and serves; NEW is `b`. Behind a hook, or behind a real nginx."""

    def __init__(self, home: Path, kind: Kind, *, behind_nginx: bool = False) -> None:
        self.home, self.kind = home, kind
        self._upgrades: list[subprocess.Popen[str]] = []
        for each in ("bin", "env", "units", "rules"):
            (home / each).mkdir(parents=True)
        for each in ("calls", "kill", "fails"):
            (home / each).write_text("")
        for each in ("systemctl", "systemd-run", "podman", "hook", "nginx"):
            program = home / "bin" / each
            words = [sys.executable, "-SE", FAKE, home, each]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
            program.chmod(0o755)
        self.ports = {name: free_port() for name in "ab"}
        for name, port in self.ports.items():
            text = f"IMAGE=image:2\nPODMAN=--network host\nWORDS=/models/llama --port {port}\n"
            (home / "env" / f"{name}.env").write_text(text)
            self.rules(name)
        (home / "where").write_text(self.address("a"))
        self.front = Front(home / "front", self.address("a")) if behind_nginx else None
        self._nginx = self.front.start() if self.front else None
        self.start("a")
        if kind == "systemd":
            self._do("systemctl", "enable", "shardboot@a.service")
        self.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for upgrade in self._upgrades:
            # What a failed test has left under way.
            with upgrade:
                upgrade.kill()
        for name in (*self.ports, self.errand):
            if self.lives(name):
                os.kill(self._unit(name)["pid"], signal.SIGKILL)
        if self._nginx:
            self._nginx.stop()

    @property
    def errand(self) -> str:
        """What the host calls the making of NEW's checkpoint."""
        return "shardboot-checkpoint-b.service" if self.kind == "systemd" else "b-checkpoint"

    def rules(self, instance: str, **rules: object) -> None:
        """Say how an instance answers from now on."""
        path = self.home / "rules" / f"{instance}.json"
        path.with_suffix(".new").write_text(json.dumps(rules))
        path.with_suffix(".new").replace(path)

    def fail(self, *acts: str) -> None:
        """Say which acts fail from now on."""
        (self.home / "fails").write_text(" ".join(acts))

    def kill_at(self, moment: str) -> None:
        """Have the upgrade killed before an act, or after it."""
        (self.home / "kill").write_text(moment)

    def forget(self) -> None:
        (self.home / "calls").write_text("")

    @property
    def acts(self) -> list[str]:
        """What was done to the instances and to the traffic, as `start b`."""
        return (self.home / "calls").read_text().splitlines()

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def where(self) -> str:
        """Return whom requests go to."""
        found = self.front.target() if self.front else (self.home / "where").read_text()
        return next((name for name in self.ports if self.address(name) == found), found)

    def lives(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{self._unit(name).get('pid') or 'none'}/stat")
            return path.read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def is_enabled(self, name: str) -> bool:
        return bool(self._unit(name).get("enabled"))

    def pid(self, name: str) -> int:
        return int(self._unit(name)["pid"])

    def start(self, name: str) -> None:
        """Start an instance as somebody else would, and wait until it listens."""
        if self.kind == "systemd":
            self._do("systemctl", "start", f"shardboot@{name}.service")
        else:
            env = str(self.home / "env" / f"{name}.env")
            self._do("podman", "run", "--detach", "--env-file", env, "image:2")
        deadline = time.monotonic() + SECONDS
        while not self.has_come_up(name):
            assert time.monotonic() < deadline
            time.sleep(POLL_SECONDS)

    def has_come_up(self, name: str) -> bool:
        url = f"http://{self.address(name)}/v1/models"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return NAME in answer.read().decode()
        return False

    def begin(self, *words: str, ends: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        """Start an upgrade; `ends` are other words for the two instances."""
        way = ["--nginx", str(self.front.file)] if self.front else ["--hook", "hook"]
        fixed = ["--quiet", "0.2s", "--env-dir", str(self.home / "env")]
        fixed += ["--shardboot", "/opt/shardboot", "--lock", str(self.home / "lock")]
        ends = ends or [f"{name}={port}" for name, port in self.ports.items()]
        process = subprocess.Popen(
            [sys.executable, PROGRAM, self.kind, *ends, *way, *fixed, *words],
            env=os.environ | {"PATH": f"{self.home / 'bin'}:/usr/bin:/bin"} | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._upgrades.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> Upgraded:
        said, _ = process.communicate(timeout=SECONDS)
        return Upgraded(process.returncode, said)

    def upgrade(self, *words: str, **environ: str) -> Upgraded:
        return self.finish(self.begin(*words, **environ))

    def wait_for_act(self, act: str) -> None:
        deadline = time.monotonic() + SECONDS
        while act not in self.acts:
            assert time.monotonic() < deadline, self.acts
            time.sleep(POLL_SECONDS)

    def count(self, path: Path) -> int:
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_lines(self, path: Path, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.count(path) < count:
            assert time.monotonic() < deadline, self.acts
            time.sleep(POLL_SECONDS)

    def wait_until_it_lives(self, name: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.lives(name):
            assert time.monotonic() < deadline, self.acts
            time.sleep(POLL_SECONDS)

    def is_as_before(self, pid: int) -> bool:
        """Whether the very same OLD serves, and NEW does not run, now nor after a reboot."""
        of_old = self.lives("a") and self.pid("a") == pid and self.where() == "a"
        enabled = (self.is_enabled("a"), self.is_enabled("b"))
        return of_old and not self.lives("b") and enabled == (self.kind == "systemd", False)

    def is_upgraded(self) -> bool:
        """Whether NEW serves, and OLD does not run, now nor after a reboot."""
        of_new = self.lives("b") and self.where() == "b" and not self.lives("a")
        enabled = (self.is_enabled("a"), self.is_enabled("b"))
        return of_new and enabled == (False, self.kind == "systemd")

    def _do(self, *words: str) -> None:
        subprocess.run([self.home / "bin" / words[0], *words[1:]], check=True)

    def _unit(self, name: str) -> dict[str, Any]:
        path = self.home / "units" / name
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found
