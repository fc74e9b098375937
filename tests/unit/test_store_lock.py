from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint.errors import DamagedError, LockTimeoutError, StoreError
from entrypoint.store.lock import exclusive, hold_manifest

HOLDER = """
import sys, time
from pathlib import Path
from entrypoint.store.lock import exclusive
with exclusive(Path(sys.argv[1]), 0):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_wait_ends_with_the_holders_pid(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", 60) as child:
        told: list[str] = []
        with (
            pytest.raises(LockTimeoutError, match=f"process {child.pid} "),
            exclusive(tmp_path / "lock", 0.3, told.append),
        ):
            pytest.fail("two hold it")
        assert len(told) == 1
        assert f"waiting for process {child.pid}" in told[0]
        child.kill()


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", 60) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with exclusive(tmp_path / "lock", 0):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


LOOKER = """
import os, sys
from pathlib import Path
from entrypoint.model.bounded import within
from entrypoint.store.lock import exclusive

def hang():
    print("looking", flush=True)
    sys.stdin.read()
    print("done", flush=True)
    return True

with exclusive(Path(sys.argv[1]), 0):
    within(60, hang)
"""


def test_the_lock_of_a_killed_holder_is_free_although_its_look_hangs(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOKER, tmp_path / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "looking\n"
        child.kill()
        child.wait()
        with exclusive(tmp_path / "lock", 0):
            pass
        child.stdin.close()
        # Only now has the look's process come to its end.
        assert child.stdout.read() == "done\n"


def test_the_lock_is_free_behind_the_block_although_a_descriptor_of_it_lives_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    with exclusive(path, 0):
        fds = Path("/proc/self/fd")
        (held,) = [int(fd.name) for fd in fds.iterdir() if os.path.realpath(fd) == str(path)]
        kept = os.dup(held)
    try:
        with exclusive(path, 0):
            pass
    finally:
        os.close(kept)


def test_a_waiter_gets_it_when_the_holder_ends(tmp_path: Path) -> None:
    told: list[str] = []
    with holder(tmp_path / "lock", 60) as child:

        def end(text: str) -> None:
            told.append(text)
            child.terminate()

        with exclusive(tmp_path / "lock", 30, end):
            assert told


def test_an_error_inside_gives_it_back(tmp_path: Path) -> None:
    def fail() -> None:
        with exclusive(tmp_path / "lock", 0):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours, without words
        fail()
    with exclusive(tmp_path / "lock", 0):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_it_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    told: list[str] = []
    with exclusive(tmp_path / "lock", 0, told.append):
        pass
    assert "going on without" in told[0]


def test_a_lock_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"), exclusive(tmp_path / "nowhere" / "lock", 0):
        pytest.fail("held")


def test_a_held_manifest_crosses_exec_and_keeps_its_lock(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path)
    path = tmp_path / manifest.name / "manifest.json"
    descriptor = hold_manifest(path.parent, manifest.digest)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    os.close(descriptor)
    other = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(hold_manifest(path.parent, manifest.digest))
        child.kill()
        child.wait()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.wait()
        os.close(other)


def test_holding_looks_again_at_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(tmp_path)
    directory = tmp_path / manifest.name
    with pytest.raises(DamagedError, match="expected the manifest 00"):
        hold_manifest(directory, "00")

    def swap_meanwhile(descriptor: int, operation: int) -> None:
        (directory / "manifest.json").rename(directory / "old")
        (directory / "manifest.json").write_bytes((directory / "old").read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", swap_meanwhile)
        with pytest.raises(DamagedError, match="replaced"):
            hold_manifest(directory, manifest.digest)
    (directory / "manifest.json").write_text("{")
    with pytest.raises(DamagedError, match="changed"):
        hold_manifest(directory, manifest.digest)
    (directory / "manifest.json").unlink()
    with pytest.raises(DamagedError, match="No such file"):
        hold_manifest(directory, manifest.digest)


def test_a_collector_that_holds_on_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(tmp_path)
    monkeypatch.setattr("entrypoint.store.lock._HOLD_SECONDS", 0.2)
    collector = os.open(tmp_path / manifest.name / "manifest.json", os.O_RDONLY)
    fcntl.flock(collector, fcntl.LOCK_EX)
    started = time.monotonic()
    with pytest.raises(LockTimeoutError):
        hold_manifest(tmp_path / manifest.name, manifest.digest)
    assert time.monotonic() - started < 5
    os.close(collector)
