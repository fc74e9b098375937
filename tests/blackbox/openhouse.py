"""A house that everybody may enter, and a Python that everybody may run. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from blackbox.harness import House

SERVICE: Final = 2000


@contextlib.contextmanager
def open_python() -> Iterator[str]:
    """Yield a Python like ours that everybody may run, with what ours has installed."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    if _runs_as(SERVICE, sys.executable):
        yield sys.executable
        return
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = shutil.which(name, path="/usr/bin:/usr/local/bin")
    if system is None or not _runs_as(SERVICE, system):
        pytest.skip(f"uid {SERVICE} can run neither {sys.executable} nor a {name} of the system")
    directory = Path(tempfile.mkdtemp(prefix="shardboot-python-"))
    directory.chmod(0o755)
    subprocess.run([system, "-m", "venv", "--without-pip", directory], check=True)
    ours = directory / "lib" / name / "site-packages" / "ours.pth"
    ours.write_text(sysconfig.get_path("purelib") + "\n")
    yield str(directory / "bin" / "python")
    shutil.rmtree(directory)


def _runs_as(uid: int, python: str) -> bool:
    """Whether a process of root's may become `uid` and still import what this Python has.

    A home of root's, for one, is closed to others.
    """
    become = f"import os; os.setresuid({uid}, {uid}, {uid}); import tempfile; os.listdir(os.sep)"
    probe = f"{become}; os.execv({python!r}, [{python!r}, '-c', 'import tempfile'])"
    done = subprocess.run([python, "-c", probe], check=False, capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def open_house(python: str, above: str | None = None) -> Iterator[House]:
    """Yield a house for boots by root that everybody may enter, in `above` if given."""
    # Not in tmp_path, which only its owner may enter.
    root = Path(tempfile.mkdtemp(prefix="shardboot-house-", dir=above))
    root.chmod(0o755)
    made = House(root, python)
    for name in ("dumps", "calls", "events"):
        (root / name).chmod(0o777)
    yield made
    made.close()
    shutil.rmtree(root)
