"""The processes of a server, whatever group or session they are in."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.supervise import offspring

SCRIPT = "setsid sleep 1000 <&- 2>&- & echo $!; exec >&-; wait"


@pytest.fixture
def two() -> Iterator[tuple[int, int]]:
    """The pids of a process, and of its child in a session of its own."""
    with subprocess.Popen(["sh", "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child
        offspring.kill([parent.pid, child])


def test_all_that_descends_is_found_but_for_what_is_spared(two: tuple[int, int]) -> None:
    parent, child = two
    assert offspring.of(parent) == [child]
    assert {parent, child} <= set(offspring.of(os.getpid()))
    assert offspring.of(parent, {child}) == []
    assert not {parent, child} & set(offspring.of(os.getpid(), {parent}))


def test_another_process_that_has_its_number_is_not_taken_for_it(two: tuple[int, int]) -> None:
    parent, _ = two
    known = offspring.named([parent])
    assert offspring.living(known) == known
    earlier = {pid: start - 1 for pid, start in known.items() if start}
    assert list(earlier) == [parent]
    assert offspring.living(earlier) == {}


def test_who_waits_to_be_reaped_runs_no_more(two: tuple[int, int]) -> None:
    parent, _ = two
    offspring.kill([parent])
    os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
    assert parent not in offspring.of(os.getpid())


SHARES = """
from multiprocessing import resource_tracker, shared_memory
import sys
held = shared_memory.SharedMemory(create=True, size=4096)
print(resource_tracker._resource_tracker._pid, held._name.strip("/"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("title", "is_engine"),
    [("VLLM::EngineCore", True), ("VLLM::Worker_TP1", True), ("sleep", False), ("vllm", False)],
)
def test_engines_and_workers_are_known_by_their_titles(title: str, is_engine: bool) -> None:
    with subprocess.Popen([title, "1000"], executable="/bin/sleep") as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            pass  # its exec is not quite done
        found = offspring.is_engine(process.pid)
        process.kill()
    assert found is is_engine
    assert not offspring.is_engine(process.pid)


FORKS = """
import os, sys
reader, writer = os.pipe()
pid = os.fork()
if not pid:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
print(pid, flush=True)
sys.stdin.read()
"""


def test_an_engines_fork_that_has_no_title_of_its_own_is_no_engine() -> None:
    command, pipe = ["VLLM::EngineCore", "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(
        command, executable=sys.executable, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert Path(f"/proc/{fork}/cmdline").read_bytes().startswith(offspring.ENGINE)
        assert not offspring.is_engine(fork)
        assert offspring.is_engine(process.pid)


def test_pythons_own_that_clears_up_is_known_and_clears_up_after_a_kill() -> None:
    command = [sys.executable, "-c", SHARES]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        tracker, name = process.stdout.readline().split()
        deadline = time.monotonic() + 20
        while not offspring.is_tracker(int(tracker)):
            # It may still be what it was before its exec.
            assert time.monotonic() < deadline
        assert not offspring.is_tracker(process.pid)
        assert name in offspring.segments()
        assert offspring.shared_memory([process.pid]) == {f"{offspring.SHM}/{name}"}
        ended = os.pidfd_open(int(tracker))
        process.kill()
        assert select.select([ended], [], [], 20)[0]
        os.close(ended)
    assert name not in offspring.segments()


@pytest.mark.parametrize(
    ("named", "is_shared"),
    [
        ("vllm_dist_{}-tp:0-[0-1]-cpushm_0", True),
        # Of vLLM 0.27 the first part is a port.
        ("35627-tp:{}-[0-1]-cpushm_0", True),
        ("somebodys-{}", False),
    ],
    ids=["vLLM's", "of an older one", "another"],
)
def test_segments_are_known_by_their_names(named: str, is_shared: bool) -> None:
    path = offspring.SHM / named.format(uuid.uuid4().hex)
    with path.open("xb+") as file:
        try:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), 0):
                found = offspring.shared_memory([os.getpid()])
            assert (str(path) in found) is is_shared
            offspring.forget(found & {str(path)})
            assert path.exists() is not is_shared
        finally:
            path.unlink(missing_ok=True)


def test_with_a_segment_goes_the_rest_of_its_group_and_nobody_elses() -> None:
    ours, others = (f"vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm" for _ in range(2))
    names = [f"{ours}_0", f"{ours}_1", f"{others}_0"]
    try:
        for name in names:
            (offspring.SHM / name).touch()
        offspring.forget({str(offspring.SHM / names[0])})
        assert offspring.segments() & {*names} == {f"{others}_0"}
        offspring.forget({str(offspring.SHM / "psm_none")})
        assert f"{others}_0" in offspring.segments()
    finally:
        for name in names:
            (offspring.SHM / name).unlink(missing_ok=True)
