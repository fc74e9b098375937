"""Forking vLLM's processes: what stands against it, and what a fork is given anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRELUDE = """
import ctypes, os, random, socket, sys, threading
from entrypoint.vllm_plugin import forking

def in_fork(do):
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, repr(do()).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    return os.read(reader, 65536).decode()
"""


def run(script: str, **environ: str) -> str:
    """Run a script in a process that has one thread, as vLLM's first one has."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_process_with_one_thread_may_be_forked() -> None:
    assert run("print(forking.obstacle())") == ""


def test_threads_stand_against_it_by_their_names() -> None:
    script = """
wait = threading.Event()
threading.Thread(target=wait.wait, name="pool").start()
print(forking.obstacle())
wait.set()
"""
    assert run(script) == "there are threads: pool"


@pytest.mark.parametrize("name", ["ZMQbg/IO/0", "ZMQbg/Reaper", "shardboot-reap"])
def test_threads_that_are_harmless_do_not(name: str) -> None:
    script = f"""
wait = threading.Event()
threading.Thread(target=wait.wait, name={name!r}).start()
print(forking.obstacle())
wait.set()
"""
    assert run(script) == ""


def test_what_counts_only_at_a_programs_start_stands_against_it() -> None:
    told = run("os.environ['LD_PRELOAD'] = '/lib/x.so'; print(forking.obstacle())")
    assert told == "LD_PRELOAD is '/lib/x.so' for them, and counts only when a program starts"


def test_numa_binding_stands_against_it() -> None:
    assert "--numa-bind" in run("sys.argv.append('--numa-bind'); print(forking.obstacle())")


def test_a_fork_does_not_hold_the_servers_port() -> None:
    script = """
os.register_at_fork(after_in_child=forking._begin_anew)
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
pair = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
wire = socket.create_connection(server.getsockname())
def held():
    found = []
    for one in (bound, pair[0], pair[1], wire):
        try:
            os.fstat(one.fileno())
            found.append(True)
        except OSError:
            found.append(False)
    return found
print(in_fork(held), held())
"""
    assert run(script) == "[False, True, True, True] [True, True, True, True]"


def test_forks_draw_numbers_of_their_own() -> None:
    script = """
import numpy
os.register_at_fork(after_in_child=forking._begin_anew)
draws = [in_fork(lambda: (random.random(), numpy.random.random())) for _ in range(2)]
print(draws[0] != draws[1])
"""
    assert run(script) == "True"


def test_a_worker_gets_the_cores_that_vllm_has_told_its_openmp() -> None:
    script = """
os.register_at_fork(after_in_child=forking._begin_anew)
core = min(os.sched_getaffinity(0))
for name, told in {
    "GOMP_CPU_AFFINITY": f"{core}",
    "OMP_PLACES": "{%d}" % core,
    "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{core}]",
}.items():
    os.environ[name] = told
    print(in_fork(lambda: os.sched_getaffinity(0) == {core}))
    del os.environ[name]
print(in_fork(lambda: os.sched_getaffinity(0)) == repr(os.sched_getaffinity(0)))
"""
    assert run(script).split() == ["True"] * 4


def test_an_engines_end_is_seen_while_its_workers_still_run() -> None:
    script = """
import time
from multiprocessing.connection import wait
from entrypoint.vllm_plugin.fork_context import Forks
os.register_at_fork(after_in_child=forking._begin_anew)
reader, writer = os.pipe()

def work():
    os.close(writer)
    os.read(reader, 1)

def engine():
    worker = Forks().Process(target=work)
    worker.start()
    os._exit(7)

process = Forks().Process(target=engine)
process.start()
print(wait([process.sentinel], timeout=30) == [process.sentinel])
process.join()
print(process.exitcode)
os.close(writer)
"""
    assert run(script).split() == ["True", "7"]


def test_users_who_ask_for_spawned_processes_get_them() -> None:
    told = run("print(forking.obstacle())", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    assert told == "VLLM_WORKER_MULTIPROC_METHOD=spawn"
