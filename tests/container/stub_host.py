"""A machine for containers whose `vllm` is a stub: it tells who it ran as, and with what."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blackbox.harness import PYTHON_STUB, make_source
from container.image import ROOT, VLLM_HOME, limits, podman, volumes

HOUSE: Final = "/house"
"""Where the stub finds its rules, and leaves what it saw."""

DATA: Final = "/var/lib/shardboot"
RUN_SECONDS: Final = 60


@dataclass(frozen=True)
class Outcome:
    """How one container ended: its exit status, what shardboot said, and what the stub saw."""

    status: int
    stderr: str
    vllm: dict[str, Any]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What was said: reason codes, each with its sentence."""
        return re.findall(r"(?m)^shardboot: ([\w.-]+): (.*)$", self.stderr)

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.lines]

    def about(self, reason: str) -> list[str]:
        return [text for each, text in self.lines if each == reason]


class StubHost:
    """An image, a model, and volumes to mount, each as somebody left it."""

    def __init__(self, room: Path, image: str) -> None:
        self.room, self.image, self.house = room, image, room / "house"
        (self.house / "bin").mkdir(parents=True)
        (self.house / "dumps").mkdir()
        make_source(self.house / "model")
        (self.house / "rules.json").write_text("{}")
        (self.house / "calls").touch()
        stub = PYTHON_STUB.format(
            python=f"{VLLM_HOME}/bin/python3",
            stub=ROOT / "tests" / "blackbox" / "stub_vllm.py",
            house=HOUSE,
        )
        for name, text in (("python3-stub", stub), ("vllm", f"#!{HOUSE}/bin/python3-stub\n")):
            (self.house / "bin" / name).write_text(text)
            (self.house / "bin" / name).chmod(0o755)
        for name in ("dumps", "calls"):
            # Whoever the stub runs as leaves its traces.
            (self.house / name).chmod(0o777)
        self.count = 0

    def volume(self, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Path:
        """Make a directory to mount, whose it is and with that mode."""
        self.count += 1
        made = self.room / f"volume-{self.count}"
        made.mkdir()
        os.chown(made, uid, gid)
        made.chmod(mode)
        return made

    def run(self, *words: str, mounts: Sequence[str] = (), options: Sequence[str] = ()) -> Outcome:
        """Boot on the model with our `words`; `mounts` are FROM:TO, `options` podman's own."""
        (self.house / "dumps" / "1.json").unlink(missing_ok=True)
        held = [*mounts, f"{self.house}:{HOUSE}"]
        given = [word for mount in held for word in ("--volume", mount)]
        settings = {
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHARDBOOT_VLLM": f"{HOUSE}/bin/vllm",
            "SHARDBOOT_RESERVE_BYTES": "0",
            "SHARDBOOT_LOG_FORMAT": "text",
        }
        for name, value in settings.items():
            given += ["--env", f"{name}={value}"]
        bound = ("--rm", "--timeout", str(RUN_SECONDS), "--network", "none", "--no-healthcheck")
        served = ("serve", *words, f"{HOUSE}/model", "-tp", "2")
        done = podman("run", *bound, *limits(), *volumes(), *given, *options, self.image, *served)
        dump = self.house / "dumps" / "1.json"
        vllm = json.loads(dump.read_text()) if dump.exists() else {}
        return Outcome(done.returncode, done.stderr, vllm)
