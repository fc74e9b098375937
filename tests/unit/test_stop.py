"""What a server that is told to stop leaves behind, whatever it does then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.state import stops
from entrypoint.state.stops import MAX_FILES
from entrypoint.vllm_plugin.stop import LOADER_CONFIG, loader_settings

OURS = {"manifest": "m", "boot": "b1", "state": "/s"}
TOLD = [{"boot": "b1", "event": "stopped"}]

SERVER = """
import ctypes, multiprocessing, os, pathlib, signal, sys, threading, time, types
from entrypoint.state import stops
# As if vLLM's server had imported its engine's client already: then, not before, a note is made.
sys.modules["vllm.v1.engine.async_llm"] = types.ModuleType("async_llm")
def own(number, frame):
    raise SystemExit(7)
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, own)
from entrypoint.vllm_plugin import register
def tell():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
def child():
    signal.signal(signal.SIGTERM, own)
    tell()
register(); register()
if "quiet" in sys.argv:
    sys.exit(0)
if "child" in sys.argv:
    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join()
elif "deaf" in sys.argv:
    def kill():
        os.kill(os.getpid(), signal.SIGTERM)
        while not stops.told(pathlib.Path(os.environ["STATE"])):
            time.sleep(0.01)
        os._exit(9)
    threading.Thread(target=kill).start()
    # A call that no signal ends, as libzmq's poll is: no Python code runs any more.
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
    lock(mutex), lock(mutex)
else:
    tell()
"""


def line(state: Path, *words: str) -> list[str]:
    config = json.dumps(OURS | {"state": str(state)})
    return [sys.executable, "-c", SERVER, *words, LOADER_CONFIG, config]


@pytest.mark.parametrize(("words", "status"), [((), -signal.SIGTERM), (("own",), 7)])
def test_a_server_that_is_told_to_stop_leaves_a_note_and_does_as_it_would(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    done = subprocess.run(line(tmp_path, *words), check=False, timeout=60)
    assert done.returncode == status
    assert stops.told(tmp_path) == TOLD


def test_a_server_that_hears_nothing_leaves_one_too(tmp_path: Path) -> None:
    environ = os.environ | {"STATE": str(tmp_path)}
    done = subprocess.run(line(tmp_path, "deaf", "own"), check=False, timeout=60, env=environ)
    assert done.returncode == 9


def test_a_server_that_nobody_told_leaves_none(tmp_path: Path) -> None:
    assert subprocess.run(line(tmp_path, "quiet"), check=False, timeout=60).returncode == 0
    assert stops.told(tmp_path) == []
    assert [path.name for path in (tmp_path / "stops").iterdir()] == ["b1"]


def test_a_worker_that_is_ended_leaves_none_since_another_may_have_died(tmp_path: Path) -> None:
    assert subprocess.run(line(tmp_path, "child", "own"), check=False, timeout=60).returncode == 0
    assert stops.told(tmp_path) == []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["vllm", "serve", "m"], None),
        (["vllm", LOADER_CONFIG], None),
        (["vllm", LOADER_CONFIG, "{"], None),
        (["vllm", LOADER_CONFIG, "[]"], None),
        (["vllm", LOADER_CONFIG, '{"distributed": true}'], None),
        (["vllm", LOADER_CONFIG, "{}", LOADER_CONFIG, json.dumps(OURS), "-x"], OURS),
    ],
)
def test_only_what_boot_says_is_listened_to(argv: list[str], expected: object) -> None:
    assert loader_settings(argv) == expected


def test_notes_are_bounded_and_need_no_state_directory(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 9):
        assert stops.open_note(tmp_path, f"b{number}") is not None
    assert len(list((tmp_path / "stops").iterdir())) == MAX_FILES
    (tmp_path / "file").touch()
    assert stops.open_note(tmp_path / "file", "b") is None
    assert stops.told(tmp_path / "file") == []
