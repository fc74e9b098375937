"""Whether a noted process still runs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.state import process


def test_this_process_lives_and_started_when_it_did() -> None:
    start = process.started(os.getpid())
    assert start is not None
    assert process.is_alive(os.getpid(), start)
    assert not process.is_alive(os.getpid(), start - 1)


def test_one_that_ended_is_dead_reaped_or_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process.started(child.pid)
    assert process.is_alive(child.pid, start)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.started(child.pid) is None
    assert not process.is_alive(child.pid, start)
    child.communicate()
    assert not process.is_alive(child.pid, start)


def test_a_name_with_brackets_and_blanks_is_read_past(tmp_path: Path) -> None:
    program = tmp_path / ") R 1 (x"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        assert process.is_alive(child.pid, process.started(child.pid))
        assert process.started(child.pid) != 1
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("pid", "start"),
    [
        (None, 1),
        (1, None),
        (-1, 1),
        (0, 1),
        (True, "x"),
        ("1", 1),
        (1 << 80, 1),
        (1.5, 2),
        ([], {}),
    ],
)
def test_what_no_process_can_be_is_dead(pid: Json, start: Json) -> None:
    assert not process.is_alive(pid, start)


def test_a_process_that_proc_hides_is_taken_for_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(process, "_look", lambda _: None)
    assert not process.is_alive(os.getpid(), 1)
    monkeypatch.setattr(os, "kill", denied)
    assert process.is_alive(os.getpid(), 1)


def test_where_nobody_can_look_it_is_taken_for_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", exhausted)
    assert process.is_alive(os.getpid(), 1)
    assert process.started(os.getpid()) is None
    assert process.starts() == []


def test_processes_are_known_by_when_they_and_those_above_them_started() -> None:
    tell = "from entrypoint.state import process; print(*process.starts())"
    before = time.time()
    said = subprocess.check_output([sys.executable, "-c", tell], text=True)
    starts = [float(word) for word in said.split()]
    assert 2 <= len(starts) <= 4
    assert starts == sorted(starts)
    # Clock ticks are hundredths of a second.
    assert before - 0.05 <= starts[-1] <= time.time() + 0.05
    assert starts[-2] == pytest.approx(process.starts()[-1], abs=0.05)
