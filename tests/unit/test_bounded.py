"""Looks in a child: what must not get lost on the way there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.model import bounded
from entrypoint.model.bounded import Alive

PROGRAM = """
import os, signal
from entrypoint.model.bounded import within

class Told(BaseException): pass

def tell(*_):
    raise Told

signal.signal(signal.SIGTERM, tell)
# As `logging` has: what is raised in such a call is dropped.
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    within(60, lambda: 1)
except Told:
    print("told")
"""


def test_where_no_process_is_to_be_had_no_descriptor_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    before = os.listdir("/proc/self/fd"), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(BlockingIOError):
        bounded.within(60, lambda: 1)
    assert (os.listdir("/proc/self/fd"), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_a_signal_that_comes_during_a_fork_is_heard_after_it() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    assert (found.stdout, found.stderr) == ("told\n", "")


def test_who_gets_on_may_take_longer_than_any_silence() -> None:
    def look(alive: Alive) -> str:
        for _ in range(12):
            threading.Event().wait(0.1)
            alive()
        return "done"

    assert bounded.while_alive(1, look) == "done"


def test_who_falls_silent_after_signs_of_life_is_given_up() -> None:
    def look(alive: Alive) -> str:
        alive()
        threading.Event().wait()
        return "never"

    started = time.monotonic()
    assert bounded.while_alive(0.2, look) is None
    assert time.monotonic() - started < 2


def test_where_looks_hang_no_more_and_more_of_them_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    fork, kill = bounded._fork, os.kill

    def count() -> int:
        pid = fork()
        begun.append(pid)
        return pid

    def hang(_: Alive) -> str:
        threading.Event().wait()
        return "never"

    monkeypatch.setattr(bounded, "_fork", count)
    # As in the kernel, where no signal ends it.
    monkeypatch.setattr(os, "kill", lambda *_: None)
    for _ in range(bounded.MOST_LEFT + 3):
        assert bounded.while_alive(0.01, hang, at="/mnt") is None
    assert len(begun) == bounded.MOST_LEFT
    assert bounded.while_alive(60, lambda _: "there", at="/elsewhere") == "there"
    # The mount answers again.
    for pid in begun[: bounded.MOST_LEFT]:
        kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    before = len(os.listdir("/proc/self/fd"))
    assert bounded.while_alive(60, lambda _: "there", at="/mnt") == "there"
    assert len(os.listdir("/proc/self/fd")) == before - bounded.MOST_LEFT


def test_a_look_within_a_look_knows_none_that_were_left_behind_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(_: Alive) -> str:
        threading.Event().wait()
        return "never"

    def look(_: Alive) -> Json:
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        found = bounded.within(60, lambda: "there", at="/mnt")
        # None was closed for one that has had its number before.
        return [found, *(os.fstat(descriptor).st_nlink for descriptor in opened)]

    pids: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, _: pids.append(pid))
    assert bounded.while_alive(0.01, hang, at="/mnt") is None
    try:
        assert bounded.within(60, lambda: bounded.within(60, lambda: "there", at="/mnt")) == "there"
    finally:
        for pid in pids:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert bounded.while_alive(60, look) == ["there", *[1] * 8]
    assert bounded.within(60, lambda: "there", at="/mnt") == "there"


def test_who_dies_is_not_taken_for_silent() -> None:
    def look(alive: Alive) -> str:
        alive()
        raise SystemExit

    with pytest.raises(ChildProcessError, match="died"):
        bounded.while_alive(60, look)


def test_who_has_answered_and_cannot_end_is_not_waited_for(tmp_path: Path) -> None:
    def look(_: Alive) -> Json:
        # As a thread that the kernel holds, it keeps the pipe open.
        held = os.fork()
        if not held:
            threading.Event().wait()
        (tmp_path / "held").write_text(str(held))
        return "there"

    started = time.monotonic()
    try:
        assert bounded.while_alive(60, look) == "there"
    finally:
        os.kill(int((tmp_path / "held").read_text()), signal.SIGKILL)
    assert time.monotonic() - started < 10


def test_nor_is_one_whose_process_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    kill = os.kill

    def end(status: int) -> NoReturn:
        threading.Event().wait()
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "kill", lambda pid, _: pids.append(pid))
    assert bounded.while_alive(60, lambda _: "there", at="/held") == "there"
    [pid] = pids
    assert bounded._count_left("/held") == 1
    kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert bounded._count_left("/held") == 0


def test_who_dies_in_the_midst_of_its_answer_has_given_none() -> None:
    def look(_: Alive) -> Json:
        def half(writer: int, data: bytes) -> None:
            os.write(writer, data[: len(data) // 2])
            os._exit(0)

        # In the child alone.
        bounded._write = half
        return [1, 2, 3]

    with pytest.raises(ChildProcessError, match="died"):
        bounded.while_alive(60, look)
