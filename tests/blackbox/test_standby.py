"""`serve --standby`: a small process stays, and starts server after server from a standby."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blackbox.harness import House, is_gone
from processes import descendants
from serving import free_port

from entrypoint.supervise import family


@contextmanager
def supervised(house: House, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Serve on a hit, under a supervisor that is stopped at the end, if it still runs."""
    at_once = ("--standby", "--restart-delay", "0")
    port = ("--port", free_port())
    process = house.start("serve", *at_once, *words, house.model, "-tp", 2, *port)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        if process.stdout is not None and not process.stdout.closed:
            house.finish(process)


def server_of(house: House) -> dict[str, Any]:
    """Return what the latest server has seen of itself."""
    pid = house.attempts[-1]["pid"]
    found: dict[str, Any] = json.loads((house.root / "dumps" / f"{pid}.json").read_text())
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ends(house: House) -> list[int]:
    return [entry["status"] for entry in house.ledger if entry["event"] == "ended"]


def wait_for_server(house: House, event: str = "listening") -> int:
    house.wait_for(event)
    if event == "listening":
        assert house.run("wait").status == 0
    pid: int = house.attempts[-1]["pid"]
    return pid


@pytest.fixture
def saved(house: House) -> House:
    """A house whose boots are hits, and whose servers answer."""
    house.serve()
    house.wait_for("serve")
    house.rules(serve={"answers": 200})
    (house.root / "calls").write_text("")
    return house


def test_the_server_is_a_fork_of_the_standby_and_the_supervisors_child(saved: House) -> None:
    with supervised(saved) as process:
        server = wait_for_server(saved)
        assert server != process.pid
        assert parent(server) == process.pid
        assert saved.calls == ["standby", "serve"]
        seen = server_of(saved)
    # The stub's shell, which looks at signals, runs where it is exec'd.
    assert seen["signals"] == {}
    assert seen["argv"][0] == str(saved.bin / "vllm")
    assert seen["argv"][1] == "serve"
    assert "--load-format" in seen["argv"]


def test_a_server_that_is_killed_is_followed_by_another_fork(saved: House) -> None:
    with supervised(saved) as process:
        for _ in range(3):
            server = wait_for_server(saved)
            os.kill(server, signal.SIGKILL)
        last = wait_for_server(saved)
        assert parent(last) == process.pid
        assert server_of(saved)["signals"] == {}
        assert saved.calls == ["standby", *["serve"] * 4]
        assert ends(saved) == [137] * 3
    assert len({entry["boot"] for entry in saved.attempts}) == 1 + 4


def test_told_to_stop_it_passes_that_on_and_ends_as_vllm_did(saved: House) -> None:
    saved.rules(serve={"heeds": [signal.SIGTERM, signal.SIGINT]})
    for number in (signal.SIGTERM, signal.SIGINT):
        with supervised(saved) as process:
            server = wait_for_server(saved, "staying")
            process.send_signal(number)
            assert process.wait(20) == number
        assert is_gone(server)
        assert ends(saved)[-1] == number


def test_a_server_that_does_not_stop_in_time_is_killed(saved: House) -> None:
    saved.rules(serve={"heeds": [signal.SIGUSR1], "ignores": [signal.SIGTERM]})
    with supervised(saved, "--stop-timeout", "0.2s") as process:
        server = wait_for_server(saved, "staying")
        process.terminate()
        assert process.wait(20) == 137
    assert is_gone(server)


def test_hup_stops_the_server_and_starts_the_next_one(saved: House) -> None:
    saved.rules(serve={"heeds": [signal.SIGTERM]})
    with supervised(saved) as process:
        first = wait_for_server(saved, "staying")
        process.send_signal(signal.SIGHUP)
        second = wait_for_server(saved, "staying")
        assert is_gone(first)
        assert not is_gone(second)
        assert ends(saved) == [signal.SIGTERM]


def test_what_a_dead_server_left_running_is_gone_before_the_next_start(saved: House) -> None:
    saved.rules(serve={"answers": 200, "orphan": True})
    with supervised(saved):
        server = wait_for_server(saved)
        orphan = int((saved.root / "orphan").read_text())
        assert family.members(server) == sorted([server, orphan])
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert is_gone(orphan)


def test_nothing_is_left_when_the_supervisor_has_ended(saved: House) -> None:
    saved.rules(serve={"answers": 200, "orphan": True})
    with supervised(saved) as process:
        server = wait_for_server(saved)
        (standby,) = set(children(process.pid)) - {server}
    assert is_gone(server)
    assert is_gone(standby)
    assert is_gone(int((saved.root / "orphan").read_text()))


def children(pid: int) -> list[int]:
    # /proc/PID/task/PID/children leaves some out while one of them exits.
    return [child for child in descendants(pid) if parent(child) == pid]


def test_without_a_standby_that_can_be_had_servers_are_started_as_ever(saved: House) -> None:
    saved.rules(serve={"answers": 200}, standby={"exit": 1})
    with supervised(saved) as process:
        first = wait_for_server(saved)
        assert parent(first) == process.pid
        assert server_of(saved)["signals"]
        os.kill(first, signal.SIGKILL)
        wait_for_server(saved)
        assert saved.calls == ["standby", "serve", "serve"]
        process.terminate()
        boot = saved.finish(process)
    assert "standby.lost" in boot.events


def test_a_fork_that_dies_before_any_has_served_ends_the_standby(saved: House) -> None:
    saved.rules(serve={"status": 3})
    with supervised(saved) as process:
        saved.wait_for("serve")
        saved.rules(serve={"answers": 200})
        wait_for_server(saved)
        assert server_of(saved)["signals"]
        process.terminate()
        boot = saved.finish(process)
    assert "standby.given-up" in boot.events


def test_servers_that_die_again_and_again_are_given_up(saved: House) -> None:
    saved.rules(serve={"status": 3})
    with supervised(saved, "--max-restarts", 2) as process:
        assert process.wait(60) == 70
        boot = saved.finish(process)
    assert ends(saved) == [3, 3, 3]
    assert "2 restarts in a row did not help" in boot.stderr


def test_a_boot_that_refuses_ends_it_with_the_code_of_the_refusal(house: House) -> None:
    house.rules(save={"exit": 1})
    with supervised(house, "--on-miss", "refuse") as process:
        assert process.wait(20) == 31


def test_a_standby_older_than_what_is_installed_is_renewed(saved: House) -> None:
    with supervised(saved) as process:
        server = wait_for_server(saved)
        replaced = saved.root / "vllm.py"
        replaced.rename(saved.root / "vllm-before.py")
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert saved.calls == ["standby", "serve", "standby", "serve"]
        process.terminate()
        boot = saved.finish(process)
    assert "standby.renewed" in boot.events


def test_it_sleeps_while_a_server_serves(saved: House) -> None:
    with supervised(saved) as process:
        wait_for_server(saved)
        counts = [switches(process.pid)]
        # Until it has seen that the server is healthy, it looks five times a second.
        while len(counts) < 8 or (len(counts) < 40 and len(set(counts[-8:])) > 1):
            saved.run("health")
            counts.append(switches(process.pid))
        assert len(set(counts[-8:])) == 1


def descriptors(pid: int) -> set[str]:
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


def switches(pid: int) -> int:
    """Return how often a process has been put on a processor, by its own will or not."""
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)


def test_a_server_whose_process_died_and_that_says_so_is_not_waited_for(saved: House) -> None:
    saved.rules(serve={"answers": 200, "orphan": True})
    with supervised(saved) as process:
        first = wait_for_server(saved)
        # From when it has seen the server healthy, it watches all its processes.
        while "anon_inode:[pidfd]" not in descriptors(process.pid):
            assert saved.run("health").status == 0
        saved.rules(serve={"answers": 503, "orphan": True})
        os.kill(int((saved.root / "orphan").read_text()), signal.SIGKILL)
        saved.wait_for("listening")
        assert is_gone(first)
        process.terminate()
        boot = saved.finish(process)
    assert "(one of its processes had died)" in boot.stderr
