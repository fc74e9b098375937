"""The memory that a copy takes, whatever the size of the checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_large

SIZE = 3 * 10**9
BOUND = 200 * 1024 * 1024

PROGRAM = """
import sys
from pathlib import Path
from entrypoint.checkpoint.manifest import decode
from entrypoint.store import transfer
from entrypoint.store.directory import DirectoryStore

def peak():
    # ru_maxrss would count the process that started this one, see getrusage(2).
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

source, store = (DirectoryStore(Path(word)) for word in sys.argv[1:3])
(name,) = source.names()
manifest = decode(source.read_manifest(name))
before = peak()
with store.stage(name) as staged:
    transfer.copy(source, name, manifest, manifest.files, staged)
    staged.commit(manifest)
print(peak() - before)
"""


def test_a_copy_of_three_gigabytes_stays_within_200_mib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.disk_usage(tmp_path).free < 3 * SIZE:
        pytest.skip("needs 9 GB of free disk")
    shared, local = tmp_path / "shared", tmp_path / "local"
    local.mkdir()
    make_large(shared, parts=8, part_bytes=SIZE // 8)
    try:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", PROGRAM, str(shared), str(local)]
        answer = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    finally:
        shutil.rmtree(shared)
        shutil.rmtree(local)
    with capsys.disabled():
        print(f"\npeak of the copy above start: {int(answer.stdout) / 2**20:.0f} MiB")
    assert int(answer.stdout) <= BOUND
