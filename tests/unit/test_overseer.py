"""Whoever is killed, and whatever hangs: the others clean up, and nobody waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from blackbox.harness import is_gone
from processes import descendants

from entrypoint.insight.overseer import Claim, Overseer, Tell

SECONDS = 10.0


def gone(pids: Collection[int]) -> bool:
    """Tell whether all have ended, now or within seconds."""
    deadline = time.monotonic() + SECONDS
    while not all(is_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(is_gone(pid) for pid in pids)


def overseen(scratch: Path, *, hangs: bool = True) -> Overseer:
    def work(tell: Tell, claim: Claim) -> None:
        claim()
        scratch.mkdir()
        tell("made")
        if hangs:
            signal.pause()

    def clear() -> bool:
        scratch.rmdir()
        return True

    return Overseer(work, clear, SECONDS)


def test_what_is_told_arrives_and_what_was_made_is_cleared(tmp_path: Path) -> None:
    with overseen(tmp_path / "scratch", hangs=False) as overseer:
        assert overseer.hear(SECONDS) == "made"
        assert (tmp_path / "scratch").exists()
        with pytest.raises(EOFError):
            overseer.hear(SECONDS)
    assert overseer.is_clear
    assert not (tmp_path / "scratch").exists()


def test_who_hangs_is_not_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    with overseen(tmp_path / "scratch") as overseer:
        assert overseer.hear(SECONDS) == "made"
        with pytest.raises(TimeoutError):
            overseer.hear(0.05)
        keeper = overseer._keeper
        family = [keeper, *descendants(keeper)]
    assert time.monotonic() - begun < SECONDS / 2
    assert overseer.is_clear
    assert not (tmp_path / "scratch").exists()
    assert len(family) == 2
    assert gone(family)


@pytest.mark.parametrize("who", ["keeper", "worker"])
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, who: str) -> None:
    with overseen(tmp_path / "scratch") as overseer:
        assert overseer.hear(SECONDS) == "made"
        keeper = overseer._keeper
        (worker,) = descendants(keeper)
        os.kill(keeper if who == "keeper" else worker, signal.SIGKILL)
        with pytest.raises(EOFError):
            overseer.hear(SECONDS)
    assert overseer.is_clear
    assert not (tmp_path / "scratch").exists()
    assert gone([keeper, worker])


PROGRAM = """
import sys, signal
from pathlib import Path
sys.path.insert(0, {tests!r})
from unit.test_overseer import overseen
with overseen(Path(sys.argv[1])) as overseer:
    print(overseer.hear(10.0), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_program_itself_dies_nothing_is_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "scratch")],
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        family = descendants(process.pid)
        process.send_signal(number)
        # Nobody else holds its output open.
        assert process.stdout.read() == ""
    assert len(family) == 2
    assert gone(family)
    assert not (tmp_path / "scratch").exists()


def test_nothing_is_cleared_that_was_not_claimed() -> None:
    def clear() -> bool:
        return False

    with Overseer(lambda tell, _: tell("idle"), clear, SECONDS) as overseer:
        assert overseer.hear(SECONDS) == "idle"
    assert overseer.is_clear


def test_what_cannot_be_cleared_is_said() -> None:
    def work(tell: Tell, claim: Claim) -> None:
        claim()
        tell("made")

    with Overseer(work, lambda: False, SECONDS) as overseer:
        assert overseer.hear(SECONDS) == "made"
    assert not overseer.is_clear


def test_a_bug_is_told_with_its_trace() -> None:
    def work(_: Tell, __: Claim) -> None:
        raise ZeroDivisionError

    with Overseer(work, lambda: True, SECONDS) as overseer:
        assert "ZeroDivisionError" in overseer.hear(SECONDS)["bug"]
