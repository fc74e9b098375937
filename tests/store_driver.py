"""The ways a checkpoint comes to be, and to go, as a process of its own that may be killed.

python tests/store_driver.py ACT ROOT SHARED     ACT: save, copy, push, commit or gc
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpoints import Tensor, fill, make_key

from entrypoint.checkpoint.manifest import decode
from entrypoint.store import durable, publish, transfer, tree
from entrypoint.store.base import open_store
from entrypoint.store.collect import collect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.retention import Rules
from entrypoint.store.staging import join

BIG: tuple[Tensor, ...] = tuple((f"layers.{n}.weight", "U8", (1 << 20,), 1 << 20) for n in range(6))

PHASES = ("build", "check", "durable", "manifest", "rename", "published")


def save(root: Path, _: Path) -> None:
    store = DirectoryStore(root)
    with store.stage("tiny") as staged:
        staged.commit(fill(staged, make_key(), tensors=BIG))


def copy(root: Path | str, shared: Path | str) -> None:
    source, store = open_store(str(shared)), open_store(str(root))
    (name,) = source.names()
    manifest = decode(source.read_manifest(name))
    with store.stage(name, manifest.content) as staged:
        transfer.copy(source, name, manifest, manifest.files, staged)
        staged.commit(manifest)


def push(root: Path, shared: Path) -> None:
    copy(shared, root)


def commit(root: Path, _: Path) -> None:
    """Commit what others have built, as the last rank of a server does."""
    with DirectoryStore(root).stage("tiny") as owner:
        manifest = fill(owner, make_key(), tensors=BIG)
        owner.disown()
    with join(owner.path) as staged:
        staged.commit(manifest)


def gc(root: Path, _: Path) -> None:
    collect(DirectoryStore(root), root.parent / "state", Rules(grace=-1), dry_run=False)


ACTS: dict[str, Callable[[Path, Path], None]] = {
    "save": save,
    "copy": copy,
    "push": push,
    "commit": commit,
    "gc": gc,
}


def tell_phases(descriptor: int, stop_at: str) -> None:
    """Write a line to `descriptor` whenever a phase begins, in this process only.

    At the first beginning of `stop_at` it stops, until SIGCONT.
    """
    published = stopped = False

    def tell(phase: str) -> None:
        nonlocal stopped
        os.write(descriptor, f"{phase}\n".encode())
        if phase == stop_at and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def wrap(phase: str, name: str, module: ModuleType = publish) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal published
            # After the rename one call is left, on the root; earlier ones are inside other phases.
            if phase != "published" or published:
                tell(phase)
            result = function(*arguments, **more)
            published = published or phase == "rename"
            return result

        setattr(module, name, call)

    tell("build")
    wrap("check", "check", durable)
    wrap("durable", "make_durable", durable)
    wrap("manifest", "_write")
    wrap("rename", "_rename")
    wrap("published", "sync_directory", tree)


if __name__ == "__main__":
    ACTS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
