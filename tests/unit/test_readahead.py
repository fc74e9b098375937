"""Reading ahead: in which order, how far, and by a process that nobody notices."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint import readahead
from entrypoint.stretches import PIECE_BYTES, Stretch, order, read_all, within

MIB = 1024 * 1024

STEPPED_ASIDE = """
import fcntl, json, os, signal, sys
from entrypoint.readahead import _step_aside
signal.signal(signal.SIGTERM, lambda *_: None)
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
if os.fork() == 0:
    _step_aside()
    found = {
        "open": sorted(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)),
        "others": [n for n in os.listdir("/proc/self/fd") if int(n) > 3],
        "policy": os.sched_getscheduler(0) == os.SCHED_IDLE,
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "name": open("/proc/self/comm").read().strip(),
    }
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
    os._exit(0)
os.wait()
"""

ENDLESS = """
import itertools, os, sys
from entrypoint.stretches import Stretch, read_all
here, there = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stretch = Stretch(sys.argv[1], 0, 4096)
    def tells():
        yield stretch
        os.write(there, b"1")
        yield from itertools.repeat(stretch)
    read_all(tells(), [parent])
    os._exit(0)
os.read(here, 1)
"""


def test_ranks_take_turns_in_the_order_of_their_parts() -> None:
    one = [("a0", PIECE_BYTES + MIB), ("a1", MIB)]
    other = [("b0", MIB)]
    assert list(order([one, other])) == [
        Stretch("a0", 0, PIECE_BYTES),
        Stretch("b0", 0, MIB),
        Stretch("a0", PIECE_BYTES, MIB),
        Stretch("a1", 0, MIB),
    ]
    assert list(order([])) == []
    assert list(order([[("empty", 0)]])) == []
    assert len([*order([[("one piece", PIECE_BYTES)]])]) == 1


def test_no_more_is_read_than_there_is_room_for() -> None:
    stretches = [Stretch("a", 0, 10), Stretch("a", 10, 10), Stretch("a", 20, 3)]
    for limit, expected in ((0, 0), (9, 0), (10, 1), (22, 2), (23, 3), (1000, 3), (math.inf, 3)):
        assert list(within(iter(stretches), limit)) == stretches[:expected]


def test_no_file_stays_open_behind_the_reader(tmp_path: Path) -> None:
    files = [(str(tmp_path / str(number)), 3) for number in range(3)]
    for path, _ in files:
        Path(path).write_text("abc")
    before = os.listdir("/proc/self/fd")
    read_all(order([files[:2], files[2:]]), [os.getppid()])
    assert os.listdir("/proc/self/fd") == before


def test_where_no_process_is_to_be_had_nothing_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise BlockingIOError

    manifest = make_checkpoint(tmp_path, name="one", tp=1)
    monkeypatch.setattr(readahead, "_seems_cached", lambda _: False)
    monkeypatch.setattr(os, "fork", no_fork)
    assert readahead.start(tmp_path / "one", manifest, [0]) is None


def test_the_reader_keeps_nothing_and_comes_last(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", STEPPED_ASIDE, str(tmp_path / "lock"), str(told)]
    subprocess.run(command, check=True)
    assert json.loads(told.read_text()) == {
        "open": [os.devnull] * 3,
        "others": [],
        "policy": True,
        "term": True,
        "name": "shardboot-ahead",
    }


def test_the_reader_ends_when_vllm_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    # What the reader inherits of stderr ends with it.
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, str(path)], stderr=subprocess.PIPE, timeout=60, check=True
    )
    assert done.stderr == b""
