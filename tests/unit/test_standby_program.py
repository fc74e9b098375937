"""The standby: what it remembers of the files that it has imported, and what does not end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, socket, sys, tempfile, time, types
from pathlib import Path
from entrypoint.vllm_plugin import learned, standby
room = Path(sys.argv[1])
sys.path.insert(0, str(room))
standby.MODULES = ()
channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""


def run(room: Path, script: str) -> str:
    command = [sys.executable, "-B", "-c", SCRIPT + script, str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_file_that_was_replaced_while_it_was_imported_counts_as_changed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("")
    script = """
def import_and_upgrade(_names):
    import engine
    imported = time.time_ns()
    # The clock of a file system is coarser than ours.
    while os.stat(engine.__file__).st_ctime_ns <= imported:
        os.utime(engine.__file__)

learned.import_all = import_and_upgrade
made = standby.Standby(channel, room / "notes", {})
print(made._changed())
"""
    assert run(tmp_path, script).startswith(f"{tmp_path}/engine.py was changed")


def test_a_file_that_was_there_before_does_not(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("")
    script = """
standby.MODULES = ["engine"]
made = standby.Standby(channel, room / "notes", {})
print("engine" in sys.modules, made._changed())
"""
    assert run(tmp_path, script) == "True \n"


def test_without_a_place_to_compile_in_it_says_so_once_and_goes_on(tmp_path: Path) -> None:
    script = """
tempfile.tempdir = "/none/such"
standby.compiling.is_used = lambda names: True
compat = types.ModuleType("entrypoint.vllm_plugin.compat")
warn = lambda text, why: print(text % why, flush=True)
compat.logger = lambda: types.SimpleNamespace(warning=warn)
sys.modules[compat.__name__] = compat
made = standby.Standby(channel, room / "notes", {})
for _ in range(2):
    theirs.send(b"learn")
theirs.shutdown(socket.SHUT_WR)
made.wait_for_orders()
"""
    (line,) = run(tmp_path, script).splitlines()
    assert line.startswith("shardboot: the standby compiles nothing: ")
    assert "/none/such" in line
