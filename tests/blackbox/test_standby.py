"""`serve --standby`: a small process stays, and starts server after server from a standby."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from blackbox.harness import House, is_gone
from blackbox.standing_by import (
    children,
    ends,
    parent,
    server_of,
    supervised,
    wait_for_health,
    wait_for_server,
)
from blackbox.watching import health
from page_cache import cached, evict
from processes import descendants


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
        # That the first one never served is no fault of the standby.
        assert server_of(saved)["signals"] == {}
        assert saved.calls == ["standby", "serve", "serve"]


@pytest.mark.parametrize("orphan", ["in its group", "in a session of its own"])
def test_what_a_dead_server_left_running_is_gone_before_the_next_start(
    saved: House, orphan: str
) -> None:
    saved.rules(serve={"answers": 200, "orphan": orphan})
    with supervised(saved):
        server = wait_for_server(saved)
        left = int((saved.root / "orphan").read_text())
        assert (os.getpgid(left) == server) == (orphan == "in its group")
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert is_gone(left)


def test_children_from_before_the_supervisor_are_none_of_a_servers(saved: House) -> None:
    before = saved.root / "before"
    script = f'sleep 1000 <&- >/dev/null 2>&1 & echo $! >{before}; exec "$@"'
    with supervised(saved, prefix=("sh", "-c", script, "sh")) as process:
        server = wait_for_server(saved)
        child = int(before.read_text())
        assert parent(child) == process.pid
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert not is_gone(child)
    os.kill(child, signal.SIGKILL)


def test_nothing_is_left_when_the_supervisor_has_ended(saved: House) -> None:
    saved.rules(serve={"answers": 200, "orphan": True})
    with supervised(saved) as process:
        server = wait_for_server(saved)
        (standby,) = set(children(process.pid)) - {server}
    assert is_gone(server)
    assert is_gone(standby)
    assert is_gone(int((saved.root / "orphan").read_text()))


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


def test_who_wants_no_forks_gets_none(saved: House) -> None:
    with supervised(saved, "--single-import", "no") as process:
        wait_for_server(saved)
        assert server_of(saved)["signals"]
        assert saved.calls == ["serve"]
        process.terminate()
        boot = saved.finish(process)
    assert boot.events.count("standby.lost") == 1
    assert "--single-import no" in boot.stderr


def test_where_forks_are_untried_they_must_be_asked_for(saved: House) -> None:
    saved.rules(serve={"answers": 200}, standby={"device": "cuda"})
    with supervised(saved) as process:
        wait_for_server(saved)
        assert server_of(saved)["signals"]
        process.terminate()
        boot = saved.finish(process)
    assert boot.events.count("standby.lost") == 1
    assert "forks are untried on cuda; --single-import yes has them" in boot.stderr
    with supervised(saved, "--single-import", "yes"):
        wait_for_server(saved)
        assert not server_of(saved)["signals"]


def test_a_boot_that_waits_for_the_standby_says_so(saved: House) -> None:
    os.mkfifo(saved.root / "gate")
    saved.rules(serve={"answers": 200}, standby={"gate": True})
    with supervised(saved):
        found = health(saved)[1]
        while found["phase"] != "waiting":
            found = health(saved)[1]
        assert found["text"] == "for the standby, which imports vLLM"
        (saved.root / "gate").write_text("")
        wait_for_server(saved)
    phases = [each["phase"] for each in saved.attempts[-1]["phases"]]
    assert phases == ["deciding", "waiting"]


def test_what_reads_ahead_outlives_the_boot_and_not_the_server(saved: House) -> None:
    saved.rules()
    saved.serve()  # headers are looked at, once
    saved.rules(serve={"answers": 200})
    for path in saved.local.glob("*/*.safetensors"):
        evict(path)
        if cached(path):
            pytest.skip("files stay in memory here")
    with supervised(saved, **saved.slow_ahead()) as process:
        server = wait_for_server(saved)
        (reader,) = [pid for pid in descendants(process.pid) if name(pid) == "shardboot-ahead"]
        assert parent(reader) == process.pid
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert is_gone(reader)


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


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


def switches(pid: int) -> int:
    """Return how often a process has been put on a processor, by its own will or not."""
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)


def test_a_server_whose_process_died_and_that_says_so_is_not_waited_for(saved: House) -> None:
    saved.rules(serve={"answers": 200, "orphan": True})
    with supervised(saved) as process:
        first = wait_for_server(saved)
        wait_for_health(saved, process.pid)
        saved.rules(serve={"answers": 503, "orphan": True})
        os.kill(int((saved.root / "orphan").read_text()), signal.SIGKILL)
        saved.wait_for("listening")
        assert is_gone(first)
        process.terminate()
        boot = saved.finish(process)
    assert "(one of its processes had died)" in boot.stderr
