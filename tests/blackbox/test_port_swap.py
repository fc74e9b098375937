"""scripts/port-swap in a real kernel: who connects goes where it says, and nobody is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWAP = ROOT / "scripts" / "port-swap"
DRIVER = Path(__file__).with_name("swapping.py")
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.fixture(autouse=True)
def network() -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed (scripts/packages)")
    made = subprocess.run([*ALONE, "nft", "list", "tables"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs root, and a kernel with nftables, for a network of its own")


def swapped(*steps: str) -> subprocess.CompletedProcess[str]:
    """Run some commands of port-swap's, one after the other, until one fails."""
    line = " && ".join(f"{SWAP} {step}" for step in steps)
    return subprocess.run([*ALONE, "sh", "-c", line], capture_output=True, text=True, check=False)


def test_no_request_is_lost_on_the_way_back_nor_on_an_upgrade(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*ALONE, sys.executable, DRIVER, tmp_path / "world"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    failed, upgraded = told["upgrades"]
    assert (failed["status"], failed["serves"]) == (1, "a"), failed["said"]
    assert (upgraded["status"], upgraded["serves"]) == (0, "b"), upgraded["said"]
    assert told["lost"] == []


def test_it_says_where_connections_go(tmp_path: Path) -> None:
    moves = ("8000 move 127.0.0.1:8001", "8000 move [::1]:8002", "9000 move host:8003")
    done = swapped(*moves, "8000 where", "9000 where")
    assert (done.returncode, done.stdout) == (0, "127.0.0.1:8002\n127.0.0.1:8003\n")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("8000 where", "nothing is sent on from port 8000 yet"),
        ("8000 move 127.0.0.1:8000", "cannot be sent on to itself"),
        ("8000 move 127.0.0.1", "expected PORT move HOST:PORT2"),
        ("8000 move host:99999", "expected PORT move HOST:PORT2"),
        ("8000 move 'host:1;'", "expected PORT move HOST:PORT2"),
        ("0 where", "expected PORT where"),
        ("8000 stay", "expected where or move, found stay"),
    ],
)
def test_what_makes_no_sense_is_one_line(step: str, said: str) -> None:
    done = swapped(step)
    assert done.returncode == 1
    assert done.stderr.startswith("port-swap: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
