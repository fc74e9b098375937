"""What a boot leaves of itself while it runs, and which boot is meant where there are several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.state import process, reporter, status
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address, Life, Server, Status

ADDRESS = Address(host="h", port=1, uds="/u", certfile="/c", keyfile="/k", mutual=True)
SERVER = Server(pid=7, start=8, namespace="pid:[1]", host_boot="b")
FULL = Status(
    boot="b1",
    phase="copying",
    text="t",
    action="copy",
    tier="shared",
    reason="shared.hit",
    checkpoint="c",
    ranks="rank 1 of 2",
    done=3,
    total=9,
    eta=1.5,
    started=1.0,
    since=2.0,
    updated=3.0,
    healthy=4.0,
    server=SERVER,
    address=ADDRESS,
)


def test_a_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    status.write(tmp_path, FULL)
    assert status.read_all(tmp_path) == [FULL]
    assert all(FULL)  # no field at its default, or this would not show
    assert [path.name for path in (tmp_path / "status").iterdir()] == ["b1.json"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[]", b"3", b"[" * 50_000, b"{}", b'{"boot": "other"}', b" " * 70_000],
    ids=lambda data: str(data[:12]),
)
def test_a_file_that_is_torn_or_of_another_boot_is_passed_over(tmp_path: Path, data: bytes) -> None:
    status.write(tmp_path, FULL)
    (tmp_path / "status" / "b2.json").write_bytes(data)
    (tmp_path / "status" / ".b3.json.7.abc").write_bytes(b"half a wri")
    assert status.read_all(tmp_path) == [FULL]


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("phase", 3),
        ("done", "many"),
        ("done", True),
        ("eta", 1e999),
        ("started", 1e15),
        ("done", 1 << 2000),
        ("total", -1),
        ("text", "a\0b"),
        ("started", None),
        ("server", []),
        ("address", "x"),
    ],
)
def test_a_field_that_is_odd_is_as_good_as_absent(tmp_path: Path, field: str, odd: object) -> None:
    status.write(tmp_path, FULL)
    path = tmp_path / "status" / "b1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: odd, "unknown": 1}))
    (found,) = status.read_all(tmp_path)
    assert found == FULL._replace(**{field: getattr(Status(), field)})


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    status.write(tmp_path, FULL)
    path = tmp_path / "status" / "b1.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert status.read_all(tmp_path) == []


def test_a_link_that_somebody_put_there_is_not_touched_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    os.utime(precious, (1, 1))
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "b1.json").symlink_to(precious)
    status.touch(tmp_path, "b1")
    assert precious.stat().st_mtime == 1


def test_files_are_bounded_in_number_and_those_asked_about_stay(tmp_path: Path) -> None:
    for number in range(status.MAX_FILES + 3):
        status.write(tmp_path, FULL._replace(boot=f"b{number}", started=float(number)))
        os.utime(tmp_path / "status" / f"b{number}.json", (number, number))
    status.touch(tmp_path, "b1")
    status.forget_oldest(tmp_path)
    kept = [found.boot for found in status.read_all(tmp_path)]
    assert len(kept) == status.KEPT_FILES
    assert "b1" in kept
    assert not {"b0", "b2", "b3"} & set(kept)
    status.forget_oldest(tmp_path)
    assert len(status.read_all(tmp_path)) == status.KEPT_FILES


def test_this_process_lives_and_a_reused_pid_does_not() -> None:
    this = Server.this()
    assert this.life == "here"
    assert this._replace(start=this.start + 1).life == "gone"
    assert this._replace(host_boot="before the power loss").life == "gone"
    assert this._replace(namespace="pid:[1]").life == "elsewhere"


def test_a_process_that_ended_is_gone_reaped_or_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = Server.this()._replace(pid=child.pid, start=process.started(child.pid) or 0)
    lives = [server.life]
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    lives.append(server.life)
    child.communicate()
    assert [*lives, server.life] == ["here", "gone", "gone"]


@pytest.mark.parametrize(
    ("lives", "meant"),
    [
        ([], None),
        (["gone", "gone"], 0),
        (["gone", "here", "here"], 1),
        (["elsewhere", "here"], 1),
        (["gone", "elsewhere", "elsewhere"], 1),
        (["here", "elsewhere", "gone"], 0),
    ],
)
def test_the_newest_that_runs_here_is_meant(
    lives: list[Life], meant: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "life", property(lambda self: lives[self.pid]))
    boots = [Status(boot=str(n), server=Server(pid=n)) for n in range(len(lives))]
    found = status.meant(boots)
    assert (found.server.pid if found else None) == meant


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reporter, "time", clock)
    return clock


def read(root: Path) -> Status:
    (found,) = status.read_all(root)
    return found


def test_a_reporter_says_each_phase_and_who_it_is(tmp_path: Path, clock: Clock) -> None:
    boot = Reporter(tmp_path, "b", ADDRESS)
    assert status.read_all(tmp_path) == []
    boot.phase("deciding")
    clock.now += 5
    boot.know(tier="shared")
    boot.phase("copying", checkpoint="c")
    found = read(tmp_path)
    assert (found.phase, found.tier, found.checkpoint) == ("copying", "shared", "c")
    assert (found.started, found.since, found.updated) == (1000.0, 1005.0, 1005.0)
    assert (found.address, found.server.pid) == (ADDRESS, os.getpid())
    assert found.server.life == "here"


def test_phases_follow_one_another_with_all_their_bytes_until_vllm_starts(clock: Clock) -> None:
    boot = Reporter(None, "b", ADDRESS)
    assert boot.phases == []
    boot.phase("deciding")
    clock.now += 5
    boot.phase("copying")
    clock.now += 2
    boot.progress(30, 90)
    # Too soon after the other one to be written, and still the last that was heard.
    boot.progress(90, 90)
    told: list[Json] = [
        {"phase": "deciding", "start": 1000.0, "end": 1005.0},
        {"phase": "copying", "start": 1005.0, "end": 1007.0, "bytes": 90},
    ]
    assert boot.phases == told
    boot.phase("starting")
    clock.now += 9
    assert boot.phases == told


def test_the_same_phase_said_again_goes_on(tmp_path: Path, clock: Clock) -> None:
    boot = Reporter(tmp_path, "b", ADDRESS)
    boot.phase("proving", "first")
    clock.now += 5
    boot.phase("proving", "x" * 9999)
    found = read(tmp_path)
    assert (found.since, found.text) == (1000.0, "x" * reporter.MAX_TEXT)


def test_progress_is_written_every_second_and_tells_what_is_left(
    tmp_path: Path, clock: Clock
) -> None:
    boot = Reporter(tmp_path, "b", ADDRESS)
    boot.phase("saving")
    clock.now += 20
    boot.progress(0, 90)  # vLLM starts, which says nothing about the pace
    clock.now += 2
    boot.progress(30, 90)
    found = read(tmp_path)
    assert (found.done, found.total, found.eta) == (30, 90, 4.0)
    clock.now += 0.9
    boot.progress(40, 90)
    assert read(tmp_path).done == 30
    clock.now += 0.2
    boot.progress(95, 90)
    assert (read(tmp_path).done, read(tmp_path).eta) == (95, 0.0)
    boot.phase("starting")
    assert (read(tmp_path).done, read(tmp_path).total) == (0, 0)


@pytest.mark.parametrize("breaks", [lambda path: path.write_text(""), lambda path: None])
def test_without_a_place_to_write_a_boot_goes_on(
    tmp_path: Path, breaks: Callable[[Path], Any]
) -> None:
    root = tmp_path / "state"
    breaks(root)
    boot = Reporter(root, "b", ADDRESS)
    boot.phase("deciding")
    boot.progress(1, 2)
    assert boot.is_kept == root.is_dir()
    assert len(status.read_all(root)) == int(boot.is_kept)


def test_who_reports_nothing_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    boot = Reporter(None, "b", ADDRESS)
    boot.phase("copying")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from entrypoint.state.status import *\n"
        "for n in range(2000): write(Path(sys.argv[1]), Status(boot='b', done=n, text='x' * n))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as writer:
        seen = []
        while writer.poll() is None:
            seen += status.read_all(tmp_path)
    assert writer.returncode == 0
    assert seen
    assert all(len(found.text) == found.done for found in seen)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address(), "http://*:8000"),
        (Address(host="10.0.0.1", port=1), "http://10.0.0.1:1"),
        (Address(host="::1", port=1, certfile="c"), "https://[::1]:1"),
        (Address(uds="/run/v.sock"), "http+unix:/run/v.sock"),
        (Address(uds="/run/v.sock", keyfile="k"), "https+unix:/run/v.sock"),
    ],
)
def test_an_address_is_said_as_people_know_it(address: Address, text: str) -> None:
    assert str(address) == text
