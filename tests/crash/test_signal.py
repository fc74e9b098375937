"""SIGTERM in the middle of a large copy: gone within a second, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_large
from store_contract import left_over

from entrypoint.store.directory import DirectoryStore

PROGRAM = """
import signal, sys
from pathlib import Path
import store_driver
from entrypoint.errors import Interrupted

def stop(number, frame):
    raise Interrupted(number)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
try:
    store_driver.copy(Path(sys.argv[1]), Path(sys.argv[2]))
except Interrupted as error:
    sys.exit(128 + error.signal_number)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("shared")
    make_large(root, parts=4, part_bytes=512 << 20)
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("delay", [0.1, 0.5, 0.9])
def test_a_copy_ends_within_a_second_of_sigterm(
    tmp_path: Path, shared: Path, delay: float, capsys: pytest.CaptureFixture[str]
) -> None:
    local = DirectoryStore(tmp_path / "local")
    local.root.mkdir()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(local.root), str(shared)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay)
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        status = child.wait()
        seconds = time.monotonic() - started
    with capsys.disabled():
        print(f"\nSIGTERM {delay} s into a copy of 2 GB: gone after {seconds:.2f} s")
    assert status == 128 + signal.SIGTERM
    assert seconds < 2
    assert local.names() == []
    assert left_over(local) == []
