"""File systems of a chosen kind and size, mounted for the time of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(kind: str, directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a fresh file system below `directory`; skip, with the reason, where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting {kind} needs root")
    point = directory / kind
    point.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(point)]
    else:
        maker = shutil.which(f"mkfs.{kind}")
        if maker is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        image = directory / f"{kind}.img"
        image.touch()
        os.truncate(image, megabytes << 20)
        subprocess.run([maker, str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(point)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False)
