"""A supervisor when things go wrong: servers that hang, a machine that is short of something."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from blackbox.harness import LAUNCH, House, is_gone
from blackbox.openhouse import open_house
from blackbox.standing_by import (
    Systemd,
    children,
    descriptors,
    ends,
    server_of,
    supervised,
    wait_for_health,
    wait_for_line,
    wait_for_server,
)
from blackbox.watching import health

from entrypoint.model import bounded

IMPATIENT: Final = (
    f"from entrypoint.supervise import supervisor; supervisor.BUSY_SECONDS = 0.1; {LAUNCH}"
)
SHORT: Final = f"from entrypoint.supervise import health; health.FALL_SECONDS = 0.5; {LAUNCH}"
FREEZER: Final = Path("/sys/fs/cgroup/freezer")
ANSWERS: Final = {"answers": 200}


def wait_for_watch(supervisor: int) -> None:
    """Wait until it watches a process of a server."""
    while True:
        # One may be closed while they are listed.
        with suppress(FileNotFoundError):
            if "anon_inode:[pidfd]" in descriptors(supervisor):
                return


MOST: Final = 64
"""Processes that a supervisor's user may have, and so many others."""

NOBODY_ELSE: Final = 61_234
"""A user who has no other processes, not even in a container: they would count."""


@pytest.fixture
def systemd(saved: House) -> Iterator[Systemd]:
    with Systemd(saved.root / "notify", watchdog_seconds=0.6) as made:
        yield made


def test_a_server_that_hangs_is_replaced(saved: House, systemd: Systemd) -> None:
    with supervised(saved, "--hang-timeout", "1s", **systemd.environ) as process:
        first = wait_for_server(saved)
        systemd.wait_for("READY", "1")
        os.kill(first, signal.SIGSTOP)
        told = systemd.wait_for("STATUS", "unhealthy: ")
        # The supervisor sees to it, so systemd need not.
        assert told[-1]["WATCHDOG"] == "1"
        second = wait_for_server(saved)
        assert is_gone(first)
        assert second != first
        assert ends(saved) == [128 + signal.SIGKILL]
        process.terminate()
        boot = saved.finish(process)
    assert "(it hung)" in boot.stderr


def test_one_that_waits_for_ever_for_a_worker_that_died_before_it_served_is_replaced(
    saved: House,
) -> None:
    saved.rules(serve={"stay": True, "orphan": True, "title": "VLLM::Worker_TP1"})
    with supervised(saved, launch=SHORT) as process:
        first = wait_for_server(saved, "staying")
        wait_for_watch(process.pid)
        saved.rules(serve=ANSWERS)
        os.kill(int((saved.root / "orphan").read_text()), signal.SIGKILL)
        wait_for_server(saved)
        assert is_gone(first)
        process.terminate()
        boot = saved.finish(process)
    assert "(one of its processes had died)" in boot.stderr


def test_without_a_timeout_a_server_that_hangs_is_systemds_to_judge(
    saved: House, systemd: Systemd
) -> None:
    with supervised(saved, **systemd.environ):
        first = wait_for_server(saved)
        systemd.wait_for("READY", "1")
        os.kill(first, signal.SIGSTOP)
        assert "WATCHDOG" not in systemd.wait_for("STATUS", "unhealthy: ")[-1]
        os.kill(first, signal.SIGCONT)
        told = systemd.wait_for("STATUS", "serving: ")
        assert ["WATCHDOG" in each for each in told] == [*[False] * (len(told) - 1), True]
        assert not is_gone(first)


def test_systemd_is_told_to_be_patient_until_it_serves_and_that_nothing_hangs(
    saved: House, systemd: Systemd
) -> None:
    with supervised(saved, **systemd.environ):
        told = systemd.wait_for("READY", "1")
        assert told[-1]["STATUS"].startswith("serving: local on ")
        assert {each["EXTEND_TIMEOUT_USEC"] for each in told[:-1]} == {"60000000"}
        assert {each["WATCHDOG"] for each in told} == {"1"}
        for _ in range(3):
            assert systemd.hear() == {"READY": "1", "WATCHDOG": "1"}


def test_between_two_servers_it_says_so_and_nothing_hangs(saved: House, systemd: Systemd) -> None:
    delay = ("--restart-delay", "1h")
    with supervised(saved, *delay, **systemd.environ) as process:
        server = wait_for_server(saved)
        saved.rules(serve={"status": 3})
        os.kill(server, signal.SIGKILL)
        systemd.wait_for("STATUS", "restarting: vLLM ended with 3 before it served")
        assert health(saved)[1]["phase"] == "restarting"
        assert "its supervisor starts the next one" in saved.run("status").stdout
        for _ in range(3):
            told = systemd.hear()
            assert told["WATCHDOG"] == "1"
            assert told["STATUS"].endswith("; starting the next one in 2 s")
        saved.rules(serve=ANSWERS)
        # Who wants it now need not wait.
        process.send_signal(signal.SIGHUP)
        wait_for_server(saved)


def test_told_to_stop_between_two_servers_it_stops(saved: House) -> None:
    saved.rules(serve={"status": 3})
    with supervised(saved, "--restart-delay", "1h") as process:
        wait_for_line(process, "server.ended")
        wait_for_line(process, "server.ended")
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_was_told_to_stop_may_finish_what_it_has_begun(
    saved: House, number: signal.Signals
) -> None:
    saved.rules(serve=ANSWERS | {"drains": 2})
    with supervised(saved) as process:
        first = wait_for_server(saved)
        wait_for_health(saved, process.pid)
        saved.rules(serve=ANSWERS)
        process.send_signal(number)
        if number == signal.SIGHUP:
            wait_for_server(saved)
            assert is_gone(first)
        else:
            assert process.wait(20) == 0
        assert ends(saved)[0] == 0


def test_a_vllm_that_cannot_be_executed_is_not_tried_again(saved: House) -> None:
    (saved.bin / "vllm").write_text("#!/none/such/python3\n")
    boot = saved.serve()
    assert boot.status == 126
    assert "engine.failed" in boot.events
    assert "internal.error" not in boot.stderr
    with supervised(saved) as process:
        assert process.wait(60) == 126
        assert "server.gave-up" in saved.finish(process).events
    assert ends(saved) == [126]


def test_while_a_standby_is_busy_signals_are_heard_and_nothing_hangs(
    saved: House, systemd: Systemd
) -> None:
    with supervised(saved, **systemd.environ) as process:
        server = wait_for_server(saved)
        systemd.wait_for("READY", "1")
        silence(process.pid, server)
        os.kill(server, signal.SIGKILL)
        systemd.wait_for("STATUS", "restarting: waiting for the standby")
        for _ in range(3):
            assert systemd.hear()["WATCHDOG"] == "1"
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_standby_that_is_busy_is_waited_for(saved: House, systemd: Systemd) -> None:
    with supervised(saved, **systemd.environ) as process:
        server = wait_for_server(saved)
        systemd.wait_for("READY", "1")
        standby = silence(process.pid, server)
        os.kill(server, signal.SIGKILL)
        systemd.wait_for("STATUS", "restarting: waiting for the standby")
        os.kill(standby, signal.SIGCONT)
        wait_for_server(saved)
        assert server_of(saved)["signals"] == {}
        assert saved.calls == ["standby", "serve", "serve"]


def test_a_standby_that_is_busy_for_too_long_is_passed_over_and_then_used_again(
    saved: House,
) -> None:
    with supervised(saved, launch=IMPATIENT) as process:
        server = wait_for_server(saved)
        standby = silence(process.pid, server)
        os.kill(server, signal.SIGKILL)
        wait_for_line(process, "standby.busy")
        os.kill(standby, signal.SIGCONT)
        server = wait_for_server(saved)
        assert server_of(saved)["signals"]
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert server_of(saved)["signals"] == {}
        assert saved.calls == ["standby", *["serve"] * 3]


def test_a_standby_that_says_nothing_from_one_start_to_the_next_is_renewed(saved: House) -> None:
    with supervised(saved, launch=IMPATIENT) as process:
        server = wait_for_server(saved)
        silence(process.pid, server)
        os.kill(server, signal.SIGKILL)
        wait_for_line(process, "standby.busy")
        os.kill(wait_for_server(saved), signal.SIGKILL)
        assert "said nothing" in wait_for_line(process, "standby.renewed")
        wait_for_server(saved)
        assert server_of(saved)["signals"] == {}
        assert saved.calls == ["standby", "serve", "serve", "standby", "serve"]


def silence(supervisor: int, server: int) -> int:
    """Have the standby hear nothing for now; return its pid."""
    (standby,) = set(children(supervisor)) - {server}
    os.kill(standby, signal.SIGSTOP)
    return standby


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Have the kernel keep a process where it is: not even SIGKILL ends it before it thaws."""
    group = FREEZER / f"shardboot-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group of processes can be frozen here: {error}")
    (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    try:
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        while (group / "cgroup.procs").read_text():
            os.sched_yield()
        group.rmdir()


def test_what_not_even_sigkill_ends_is_waited_for_and_told(saved: House) -> None:
    saved.rules(serve=ANSWERS | {"orphan": True})
    with supervised(saved) as process:
        server = wait_for_server(saved)
        orphan = int((saved.root / "orphan").read_text())
        with frozen(orphan):
            os.kill(server, signal.SIGKILL)
            assert f"SIGKILL has not ended [{orphan}]" in wait_for_line(process, "server.stuck")
            assert saved.calls == ["standby", "serve"]
        wait_for_server(saved)


def test_who_looks_at_a_mount_that_does_not_answer_is_not_waited_for(saved: House) -> None:
    look = saved.bin / bounded.NAME.decode()
    shutil.copy("/bin/sleep", look)
    saved.rules(serve=ANSWERS | {"orphan": True, "orphan_runs": str(look)})
    with supervised(saved):
        server = wait_for_server(saved)
        with frozen(int((saved.root / "orphan").read_text())):
            os.kill(server, signal.SIGKILL)
            assert wait_for_server(saved) != server


@pytest.mark.parametrize("stuck", ["the server", "what it left"])
def test_told_to_stop_it_does_not_wait_for_what_not_even_sigkill_ends(
    saved: House, stuck: str
) -> None:
    saved.rules(serve=ANSWERS | {"orphan": True})
    with supervised(saved, "--stop-timeout", "0.2s") as process:
        server = wait_for_server(saved)
        left = int((saved.root / "orphan").read_text())
        with frozen(server if stuck == "the server" else left):
            process.terminate()
            assert "SIGKILL has not ended" in wait_for_line(process, "server.stuck")
            assert process.wait(20) == (137 if stuck == "the server" else 143)


@contextmanager
def limited(process: subprocess.Popen[str], what: int, most: int) -> Iterator[None]:
    """Let a process have no more of something than so many."""
    before = resource.prlimit(process.pid, what)
    resource.prlimit(process.pid, what, (most, before[1]))
    yield
    resource.prlimit(process.pid, what, before)


def test_without_descriptors_it_waits_until_there_are_some(saved: House) -> None:
    with supervised(saved) as process:
        server = wait_for_server(saved)
        # As many as are in use at least, since poll(2) looks at the limit, too.
        with limited(process, resource.RLIMIT_NOFILE, 3):
            os.kill(server, signal.SIGKILL)
            assert "Too many open files" in wait_for_line(process, "server.unwatched")
            assert process.poll() is None
        wait_for_server(saved)


def test_without_a_process_to_be_had_it_waits_for_one(everybodys_python: str) -> None:
    with open_house(everybodys_python) as house:
        user = ("--user", NOBODY_ELSE)
        house.run("serve", *user, house.model, "-tp", 2)
        house.wait_for("serve")
        house.rules(serve=ANSWERS)
        with supervised(house, *user, prefix=("prlimit", f"--nproc={MOST}")) as process:
            server = wait_for_server(house)
            with crowd(NOBODY_ELSE, MOST):
                os.kill(server, signal.SIGKILL)
                assert "no process is to be had" in wait_for_line(process, "server.unborn")
            wait_for_server(house)


@contextmanager
def crowd(user: int, count: int) -> Iterator[None]:
    """Run so many processes of a user."""
    crowd = [subprocess.Popen(["sleep", "1000"], user=user) for _ in range(count)]
    yield
    for process in crowd:
        process.kill()
    for process in crowd:
        process.wait()
