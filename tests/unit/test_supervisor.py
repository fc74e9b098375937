"""A supervisor's bookkeeping: signals in order, and who has died by their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from entrypoint.state import process
from entrypoint.supervise.standby import Standby

SCRIPT: Final = """
import os, signal, types
from pathlib import Path
from entrypoint.log import Log
from entrypoint.state import process
from entrypoint.supervise.signals import Signals
from entrypoint.supervise.supervisor import Supervisor

def supervisor():
    settings = types.SimpleNamespace(state_dir=Path("/none"), single_import="no")
    first = types.SimpleNamespace(settings=settings, log=Log(""), environ={}, words=("model",))
    return Supervisor(first, None)

def child(ends):
    pid = os.fork()
    if not pid:
        process.die_with_parent()
        ends or signal.pause()
        os._exit(0)
    if ends:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid
"""


def run(script: str) -> str:
    command = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def test_a_stop_comes_before_what_was_told_earlier() -> None:
    script = """
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup hands down that it is ignored
signals = Signals()
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
print(*[signal.Signals(number).name for number in signals.heard()])
"""
    assert run(script) == "SIGTERM SIGHUP SIGHUP"


def test_of_all_that_die_beside_a_server_nothing_is_remembered() -> None:
    script = """
made = supervisor()
others = [child(ends=True) for _ in range(3)]
server = types.SimpleNamespace(
    pid=child(ends=True), has_told=True, hear=lambda: False, mourn=lambda ready: None,
    health=types.SimpleNamespace(wait=lambda: 0.0), descriptors=[],
)
made._turn(server)
print(made.ended == {server.pid: 0})
"""
    assert run(script) == "True"


def test_a_fork_with_the_number_of_one_that_died_before_it_has_not_ended() -> None:
    script = """
made = supervisor()
server = types.SimpleNamespace(pid=child(ends=False))
made.ended = {server.pid: 9, 1: 0}
made._adopt(server)
print(made.ended)
os.kill(server.pid, signal.SIGKILL)
"""
    assert run(script) == "{1: 0}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_what_another_user_has_left_running_is_not_waited_for() -> None:
    script = """
made = supervisor()
reader, writer = os.pipe()
theirs = os.fork()
if not theirs:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
os.setuid(65534)
left = []
server = types.SimpleNamespace(
    pid=0, clear=lambda: print("cleared"), kill=lambda pids, spares_trackers: left.extend(pids)
)
made._clear(server)
print(left == [theirs])
"""
    assert run(script) == "cleared\nTrue"


TRYING: Final = """#!/bin/sh
sleep 1000 &
echo $! >{tried}.new
mv {tried}.new {tried}
wait
"""


def test_a_standby_is_let_go_with_all_that_it_tries(tmp_path: Path) -> None:
    program, tried = tmp_path / "python", tmp_path / "tried"
    program.write_text(TRYING.format(tried=tried))
    program.chmod(0o755)
    standby = Standby(str(program), os.environ, tmp_path, "auto")
    while not tried.exists():
        time.sleep(0.01)
    pid = int(tried.read_text())
    start = process.started(pid)
    assert process.is_alive(pid, start)
    standby.end()
    deadline = time.monotonic() + 10
    while process.is_alive(pid, start) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.is_alive(pid, start)
    os.waitpid(standby.process.pid, 0)
