"""A node whose containers have a stub for vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blackbox.harness import House
from container.harness import DATA, Container, once, surroundings
from container.image import ROOT, SEARCH_PATH, VLLM_HOME

SERVICE = 2000


class Node(House):
    """A house where shardboot comes out of the image, and its volume is a disk of root's.

    Its tests and stub lie at the same paths inside; `shared`, if given, is another's.
    """

    def __init__(self, root: Path, image: str, shared: Path | None = None) -> None:
        root.mkdir(exist_ok=True)
        super().__init__(root, python=f"{VLLM_HOME}/bin/python3")
        self.image = image
        self.environ = {
            "PATH": f"{self.bin}:{SEARCH_PATH}",
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHARDBOOT_RESERVE_BYTES": "0",
        }
        self.shared = shared or self.shared
        give(root)
        volume = root / "volume"
        volume.mkdir()
        self.local, self.state = volume / "checkpoints", volume / "state"
        self.count = 0

    def begin(self, *words: object, options: Sequence[str] = (), **more: Any) -> Container:
        """Start a container for a server; `options` are podman's, `more` are variables."""
        self.count += 1
        given = [*surroundings(), *self._options(options, more)]
        log = self.root / f"{self.count}.log"
        return Container(given, [self.image, *map(str, words)], log)

    def once(
        self, *words: object, options: Sequence[str] = (), **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a container to its end."""
        return once(self.image, *map(str, words), options=self._options(options, more))

    @property
    def served(self) -> Any:
        """What the stub has seen that a container's first process became."""
        return json.loads((self.root / "dumps" / "1.json").read_text())

    def end_hanging(self) -> None:
        """Do nothing: what hangs went with its container, and its pids are others' out here."""

    def _options(self, options: Sequence[str], more: dict[str, Any]) -> list[str]:
        words = ["--volume", f"{self.local.parent}:{DATA}"]
        for path in {self.root, self.shared}:
            words += ["--volume", f"{path}:{path}"]
        for name, value in (self.environ | more).items():
            words += ["--env", f"{name}={value}"]
        return [*words, *options]


def give(root: Path) -> None:
    """Give everything to the service user."""
    for path in [root, *root.rglob("*")]:
        os.chown(path, SERVICE, SERVICE, follow_symlinks=False)
