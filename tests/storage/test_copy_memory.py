"""The memory that a copy takes, whatever the size of the checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_large
from gateway import S3

SIZE = 3 * 10**9
BOUND = 200 * 1024 * 1024

PROGRAM = """
import sys
from pathlib import Path
from entrypoint.checkpoint.manifest import decode
from entrypoint.store import transfer
from entrypoint.store.base import open_store

def peak():
    # ru_maxrss would count the process that started this one, see getrusage(2).
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

source, store = (open_store(word) for word in sys.argv[1:3])
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
        peak = peak_of_copy(shared, local)
    finally:
        shutil.rmtree(shared)
        shutil.rmtree(local)
    with capsys.disabled():
        print(f"\npeak of the copy above start: {peak / 2**20:.0f} MiB")
    assert peak <= BOUND


def test_to_a_bucket_and_back_stays_within_200_mib(
    tmp_path: Path, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    made, local = tmp_path / "made", tmp_path / "local"
    local.mkdir()
    make_large(made, parts=8, part_bytes=32 << 20)
    bucket = f"s3://{s3.bucket}/memory"
    peaks = [
        peak_of_copy(made, bucket, **s3.environ()),
        peak_of_copy(bucket, local, **s3.environ()),
    ]
    with capsys.disabled():
        print(f"\npeaks of push and pull above start: {[peak >> 20 for peak in peaks]} MiB")
    assert max(peaks) <= BOUND


def peak_of_copy(source: object, target: object, **environ: str) -> int:
    """Return by how many bytes a process grows that copies from one store to another."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(source), str(target)]
    answer = subprocess.run(
        command, env=os.environ | path | environ, check=True, capture_output=True, text=True
    )
    return int(answer.stdout)
