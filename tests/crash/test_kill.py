"""SIGKILL while a checkpoint is saved, copied, committed or collected: it is absent or complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_driver
from checkpoints import fill, make_checkpoint, make_key
from juicefs import mounted
from store_contract import deep_verify, left_over
from store_driver import ACTS, BIG, PHASES

from entrypoint.store import pins
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.sweep import sweep

KILLS = 50
"""For each act; half right where a phase begins, from nothing; half at a random moment later."""


def run_and_kill(act: str, root: Path, shared: Path, phase: str, delay: float) -> str:
    """Fork, act, and kill `delay` seconds after `phase` began.

    Return the phase that the kill came in, or "done" when it came too late.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            store_driver.tell_phases(writing, stop_at=phase)
            ACTS[act](root, shared)
            os.write(writing, b"done\n")
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        if delay:
            os.kill(child, signal.SIGCONT)
            time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as phases:
        return phases.read().decode().split()[-1]


@pytest.fixture(params=["here", pytest.param("juicefs", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return an empty directory, of this machine's disk or of a JuiceFS mount."""
    if request.param == "here":
        yield tmp_path
        return
    with mounted(tmp_path / "juicefs") as nodes:
        yield nodes.one


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "shared", tensors=BIG)
    return tmp_path / "shared"


@pytest.mark.parametrize("act", ["save", "copy", "commit"])
def test_a_kill_at_any_moment_leaves_it_absent_or_complete(
    place: Path, shared: Path, act: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    chance = random.Random(seed)  # noqa: S311 - moments, not secrets
    root = place / "local"
    store = DirectoryStore(root)
    root.mkdir()
    started = time.monotonic()
    ACTS[act](root, shared)
    typical = time.monotonic() - started
    landed: Counter[str] = Counter()
    for number in range(KILLS):
        phase, exactly = PHASES[number // 2 % len(PHASES)], number % 2 == 0
        # Else, every other time, on what is there already.
        if exactly or chance.random() < 0.5:
            shutil.rmtree(root)
            root.mkdir()
        delay = 0.0 if exactly else chance.uniform(0, typical)
        found = run_and_kill(act, root, shared, phase, delay)
        assert found == phase or not exactly
        landed[found] += 1
        for name in store.names():
            deep_verify(store, name)
        ACTS[act](root, shared)
        assert len(store.names()) == 1
        deep_verify(store, store.names()[0])
    sweep(root, -1)
    assert left_over(store) == []
    with capsys.disabled():
        print(f"\n{act}: seed {seed}, {KILLS} kills: {dict(landed)}")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "mkdirat", "fchmod"])
def test_a_kill_at_each_call_of_a_commit_leaves_it_absent_or_complete(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The moments that chance hardly ever hits: before the n-th call, for every n."""
    driver = [sys.executable, store_driver.__file__, "save"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    kills = 0
    for number in range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        inject = f"inject={call}:signal=KILL:when={number}"
        strace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
        command = [*strace, *driver, str(root), "-"]
        status = subprocess.run(command, env=environ, check=False).returncode
        store = DirectoryStore(root)
        for name in store.names():
            deep_verify(store, name)
        if status == 0:
            break
        kills += 1
        ACTS["save"](root, root)
        assert len(store.names()) == 1
        deep_verify(store, store.names()[0])
    else:
        pytest.fail("there is no end to it")
    with capsys.disabled():
        print(f"\n{call}: {kills} kills, one before each call")
    assert kills > 0


KEPT = {"newest", "pinned"}


def stock(root: Path) -> DirectoryStore:
    """Make a store in which there is something to keep, to collect, to sweep and to delete."""
    store = DirectoryStore(root)
    for number, name in enumerate(("old-1", "old-2", "pinned", "trash", "newest")):
        make_checkpoint(root, name=name, key=make_key(vllm=f"0.{number}"), parts=1)
        os.utime(store.path(name) / "manifest.json", (number + 1, number + 1))
    pins.pin(root, "pinned", store.dir_mode)
    store.retire("trash")
    with store.stage("killed") as staged:
        fill(staged, make_key())
        staged.disown()
    return store


def check_and_finish(store: DirectoryStore) -> None:
    """Whatever a killed gc left: what is listed is whole, and the next one finishes."""
    assert set(store.names()) >= KEPT
    for name in store.names():
        deep_verify(store, name)
    ACTS["gc"](store.root, store.root)
    assert set(store.names()) == KEPT
    for name in KEPT:
        deep_verify(store, name)
    assert left_over(store) == []
    assert os.listdir(store.root / ".trash") == []


def test_a_kill_at_any_moment_of_gc_loses_nothing_that_is_kept(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
    chance = random.Random(seed)  # noqa: S311 - moments, not secrets
    started = time.monotonic()
    stock(place / "first")
    stocked = time.monotonic()
    ACTS["gc"](place / "first", place)
    typical = time.monotonic() - stocked
    left: Counter[int] = Counter()
    for number in range(KILLS):
        store = stock(place / f"{number}")
        child = os.fork()
        if child == 0:
            ACTS["gc"](store.root, store.root)
            os._exit(0)
        time.sleep(chance.uniform(0, typical))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left[len(store.names())] += 1
        check_and_finish(store)
        shutil.rmtree(store.root)
    with capsys.disabled():
        print(f"\ngc: seed {seed}, {KILLS} kills in {time.monotonic() - started:.0f} s: {left}")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", ["rename", "fsync", "flock", "unlinkat"])
def test_a_kill_at_each_call_of_gc_loses_nothing_that_is_kept(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = [sys.executable, store_driver.__file__, "gc"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    kills = 0
    for number in range(1, 200):
        store = stock(tmp_path / str(number) / "store")
        inject = f"inject={call}:signal=KILL:when={number}"
        strace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
        command = [*strace, *driver, str(store.root), "-"]
        status = subprocess.run(command, env=environ, check=False).returncode
        check_and_finish(store)
        shutil.rmtree(store.root)
        if status == 0:
            break
        kills += 1
    else:
        pytest.fail("there is no end to it")
    with capsys.disabled():
        print(f"\n{call} of gc: {kills} kills, one before each call")
    assert kills > 0
