"""Upgrades under load behind scripts/port-swap, in a network of its own: run by `unshare --net`.

Prints what came of each as JSON: an upgrade that fails, and then one that does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from answers import NAME
from blackbox.upgrading import ROOT, World
from steady_load import Load

PORT = 8000
SWAP = ROOT / "scripts" / "port-swap"


def swap(*words: str) -> str:
    done = subprocess.run([SWAP, str(PORT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    told = []
    with World(Path(sys.argv[1]), "systemd") as world:
        (world.home / "bin" / "hook").write_text(
            f'#!/bin/sh\nPATH={os.environ["PATH"]}\nexec {SWAP} {PORT} "$@"\n'
        )
        for name in "ab":
            world.rules(name, pause=0.03)
        swap("move", world.address("a"))
        with Load(PORT, NAME, 20, fresh=2, stream=2) as load:
            for is_well in (False, True):
                load.wait_for(20)
                # One that fails only when requests go there already.
                words = [] if is_well else ["--front", "http://127.0.0.1:1"]
                done = world.upgrade(*words)
                load.wait_for(20)
                serves = {world.address(name): name for name in "ab"}[swap("where")]
                told.append({"status": done.status, "said": done.said, "serves": serves})
    print(json.dumps({"upgrades": told, "lost": load.lost, "answered": load.answered.total()}))


if __name__ == "__main__":
    main()
