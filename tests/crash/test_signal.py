"""SIGTERM in the middle of a large copy: gone within seconds, nothing left behind."""

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
from entrypoint.checkpoint.manifest import decode
from entrypoint.errors import Interrupted
from entrypoint.store import transfer
from entrypoint.store.directory import DirectoryStore

source, store = (DirectoryStore(Path(word)) for word in sys.argv[1:3])
(name,) = source.names()
manifest = decode(source.read_manifest(name))
left = manifest.size * int(sys.argv[3]) // 100

def stop(number, frame):
    raise Interrupted(number)

def count(copied):
    global left
    if left > 0 >= left - copied:
        print("reached", flush=True)
    left -= copied

signal.signal(signal.SIGTERM, stop)
try:
    with store.stage(name) as staged:
        transfer.copy(source, name, manifest, manifest.files, staged, count)
        staged.commit(manifest)
except Interrupted as error:
    sys.exit(128 + error.signal_number)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("shared")
    make_large(root, parts=4, part_bytes=512 << 20)
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_copy_ends_within_seconds_of_sigterm(
    tmp_path: Path, shared: Path, percent: int, capsys: pytest.CaptureFixture[str]
) -> None:
    local = DirectoryStore(tmp_path / "local")
    local.root.mkdir()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(shared), str(local.root), str(percent)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"reached\n"
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        status = child.wait(60)
        seconds = time.monotonic() - started
    with capsys.disabled():
        print(f"\nSIGTERM {percent} % into a copy of 2 GB: gone after {seconds:.2f} s")
    assert status == 128 + signal.SIGTERM
    # Most of it is deleting gigabytes that are not on the disk yet.
    assert seconds < 5
    assert local.names() == []
    assert left_over(local) == []
