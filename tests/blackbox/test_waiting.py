"""`wait` beside boots of every kind; a stub answers HTTP in vLLM's place."""

from __future__ import annotations

import json
import os
import re
import socket
import time

from blackbox.harness import Boot, House
from blackbox.watching import STAYS, files, health, rewrite, serving


class Waiting:
    """A `wait` under way, and what it says."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.process = house.start("wait")

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> Boot:
        return self.house.finish(self.process)


def test_wait_may_begin_before_the_boot_and_ends_when_vllm_serves(house: House, port: int) -> None:
    rewrite(files(house)[0], started=time.time() - 60)  # over for long
    waiting = Waiting(house)
    assert waiting.line() == f"unknown: no boot has left a status in {house.state} yet\n"
    with serving(house, "--port", port):
        done = waiting.end()
        assert done.status == 0
        assert done.stdout.endswith(f"serving: local on http://*:{port}\n")
        assert health(house)[0] == 0
    assert [entry["event"] for entry in house.ledger].count("healthy") == 1


def test_wait_is_not_for_a_boot_that_failed_before_in_another_container(house: House) -> None:
    house.run("serve", "--on-miss", "refuse", house.model, "-tp", 2)
    (path,) = files(house)
    server = json.loads(path.read_text())["server"]
    rewrite(path, server=server | {"namespace": "pid:[1]"}, started=time.time() - 60)
    done = house.run("wait", "--timeout", "0.5s")
    assert (done.status, done.stdout.partition(":")[0]) == (1, "unknown")


def test_wait_says_what_it_waits_for_and_gives_up(house: House, port: int) -> None:
    with serving(house, "--port", port, **STAYS):
        done = house.run("wait", "--timeout", "3s")
    assert done.status == 1
    first, last = done.stdout.splitlines()
    assert re.fullmatch(r"starting: vLLM on a checkpoint, for \d+ s", first)
    assert re.fullmatch(r"starting: vLLM on a checkpoint, for \d+ s; gave up after 3 s", last)


def test_wait_ends_with_the_boot_and_says_why(house: House, port: int) -> None:
    with serving(house, "--port", port, **STAYS):
        waiting = Waiting(house)
        waiting.line()
    done = waiting.end()
    assert (done.status, done.stdout) == (1, "failed: exited while starting\n")


def test_wait_ends_when_a_boot_that_began_meanwhile_was_refused(house: House) -> None:
    waiting = Waiting(house)
    assert waiting.line().startswith("unknown: ")
    house.run("serve", "--on-miss", "refuse", house.model, "-tp", 2)
    done = waiting.end()
    assert done.status == 1
    assert done.stdout.splitlines()[-1].startswith("failed: local.absent: ")


def test_wait_prints_json_once(house: House, port: int) -> None:
    with serving(house, "--port", port):
        assert house.run("wait", "--format", "json").json["phase"] == "serving"


def test_in_a_unit_wait_is_for_the_process_that_systemd_started(house: House, port: int) -> None:
    with serving(house, "--port", port) as process:
        assert house.run("wait", MAINPID=process.pid).status == 0
        other = house.run("wait", "--timeout", "1s", MAINPID=os.getpid())
    assert other.status == 1
    assert "no boot has left a status" in other.stdout


def test_in_a_unit_systemd_hears_that_there_is_progress(house: House, port: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(20)
        channel.bind(str(house.root / "notify"))
        with serving(house, "--port", port, **STAYS):
            house.run("wait", "--timeout", "3s", NOTIFY_SOCKET=house.root / "notify")
        told = channel.recv(4096).decode().splitlines()
    assert told[0].startswith("STATUS=starting: vLLM on a checkpoint")
    assert told[1] == "EXTEND_TIMEOUT_USEC=60000000"
    with serving(house, "--port", port, **STAYS):
        gone = house.run("wait", "--timeout", "0.5s", NOTIFY_SOCKET=house.root / "none-such")
    assert "Traceback" not in gone.stderr


def test_in_a_unit_the_last_thing_that_systemd_shows_is_how_it_ended(
    house: House, port: int
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(20)
        channel.bind(str(house.root / "notify"))
        with serving(house, "--port", port):
            house.run("wait", NOTIFY_SOCKET=house.root / "notify")
        assert channel.recv(4096).decode() == f"STATUS=serving: local on http://*:{port}\n"
