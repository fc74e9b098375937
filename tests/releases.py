"""Checkpoints of one deployment through its releases, and servers of them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint, make_key

from entrypoint.checkpoint.digest import Json, digest_bytes
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.state import process
from entrypoint.state.ledger import Ledger
from entrypoint.store.directory import DirectoryStore

DAY = 86_400.0


def add(store: DirectoryStore, vllm: str, days: float, **more: Any) -> Manifest:
    """Publish the checkpoint of one release, as if made some days ago."""
    manifest = make_checkpoint(store.root, key=make_key(vllm=vllm), name=f"of-{vllm}", **more)
    then = time.time() - days * DAY
    os.utime(store.path(manifest.name) / "manifest.json", (then, then))
    return manifest


def three(store: DirectoryStore) -> list[Manifest]:
    """Publish three releases of one deployment; return them, oldest first."""
    return [add(store, f"0.3{n}", days=30 - n) for n in range(3)]


def many(room: Path, count: int) -> None:
    """Publish so many in the stores `room/local` and `room/shared`; boots have served some.

    Each is of a family of its own: none is superseded, and so none is collected.
    """
    for number in range(count):
        model = digest_bytes(b"%d" % number)
        key = make_key(model=model, architecture=f"Model{number}")
        made = make_checkpoint(room / "local", key=key, name=f"of-{number}")
        if number % 20 == 0:
            serve(room / "state", made, boot=f"b{number}", pid=1, pid_start=0)
    shutil.copytree(room / "local", room / "shared")


def serve(state: Path, manifest: Manifest, **more: Json) -> None:
    """Note that this very process serves a checkpoint."""
    entry: dict[str, Json] = {"boot": "b", "event": "attempt", "action": "reuse", "time": 1.0}
    entry |= {"manifest": manifest.digest, "host_boot": process.host_boot()}
    entry |= {"pid": os.getpid(), "pid_start": process.started(os.getpid())}
    assert Ledger(state).append(entry | more)
