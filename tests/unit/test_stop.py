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
from entrypoint.state.ledger import ENOUGH, Ledger
from entrypoint.state.stops import MAX_TOLD, MAX_UNTOLD
from entrypoint.vllm_plugin.stop import LOADER_CONFIG, loader_settings

OURS = {"manifest": "m", "boot": "b1", "state": "/s"}
TOLD = [{"boot": "b1", "event": "stopped"}]

SERVER = """
import ctypes, multiprocessing, os, pathlib, signal, sys, threading, time, types
from entrypoint.state import stops
# As if vLLM's server had imported its engine's client already: then, not before, a note is made.
if "headless" not in sys.argv:
    sys.modules["vllm.v1.engine.async_llm"] = types.ModuleType("async_llm")
def own(number, frame):
    raise SystemExit(7)
number = signal.Signals[os.environ.get("TOLD_BY", "SIGTERM")]
# Whoever runs this in the background may have had them ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "own" in sys.argv:
    signal.signal(number, own)
if "ignored" in sys.argv:
    signal.signal(number, signal.SIG_IGN)
from entrypoint.vllm_plugin import register
def tell():
    os.kill(os.getpid(), number)
    signal.pause()
def child():
    signal.signal(signal.SIGTERM, own)
    tell()
register(); register()
if "headless" in sys.argv:
    # As vLLM does there: its handler, then its workers.
    signal.signal(number, own)
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
if "quiet" in sys.argv:
    sys.exit(0)
if "ignored" in sys.argv:
    os.kill(os.getpid(), number)
    sys.exit(0)
if "child" in sys.argv:
    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join()
elif "deaf" in sys.argv:
    # A call that no signal ends, as libzmq's poll is: no Python code runs any more.
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
    lock(mutex)
    call = pathlib.Path(f"/proc/self/task/{os.getpid()}/syscall")
    def kill():
        # Not before it waits there: the signal would find Python code that runs.
        while hex(ctypes.addressof(mutex)) not in call.read_text().split():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while not stops.told(pathlib.Path(os.environ["STATE"])):
            time.sleep(0.01)
        os._exit(9)
    threading.Thread(target=kill).start()
    lock(mutex)
else:
    tell()
"""


def line(state: Path, *words: str) -> list[str]:
    config = json.dumps(OURS | {"state": str(state), "headless": "headless" in words})
    return [sys.executable, "-c", SERVER, *words, LOADER_CONFIG, config]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("words", [(), ("own",)])
def test_a_server_that_is_told_to_stop_leaves_a_note_and_does_as_it_would(
    tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    environ = os.environ | {"TOLD_BY": number.name}
    done = subprocess.run(
        line(tmp_path, *words), check=False, timeout=60, env=environ, stderr=subprocess.PIPE
    )
    # With Python's own handler, ^C is a KeyboardInterrupt first.
    assert (b"KeyboardInterrupt" in done.stderr) == (number == signal.SIGINT and not words)
    assert done.returncode == (7 if words else -number)
    assert stops.told(tmp_path) == TOLD


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_server_ignores_tells_it_nothing(tmp_path: Path, number: signal.Signals) -> None:
    environ = os.environ | {"TOLD_BY": number.name}
    done = subprocess.run(line(tmp_path, "ignored"), check=False, timeout=60, env=environ)
    assert done.returncode == 0
    assert stops.told(tmp_path) == []


def test_a_server_that_hears_nothing_leaves_one_too(tmp_path: Path) -> None:
    environ = os.environ | {"STATE": str(tmp_path)}
    done = subprocess.run(line(tmp_path, "deaf", "own"), check=False, timeout=60, env=environ)
    assert done.returncode == 9


def test_a_server_that_nobody_told_leaves_none(tmp_path: Path) -> None:
    assert subprocess.run(line(tmp_path, "quiet"), check=False, timeout=60).returncode == 0
    assert stops.told(tmp_path) == []
    assert [path.name for path in (tmp_path / "stops").iterdir()] == ["b1"]


def test_a_node_without_a_server_leaves_one_too(tmp_path: Path) -> None:
    done = subprocess.run(line(tmp_path, "headless"), check=False, timeout=60)
    assert done.returncode == 7
    assert stops.told(tmp_path) == TOLD


def test_a_worker_that_is_ended_leaves_none_since_another_may_have_died(tmp_path: Path) -> None:
    assert subprocess.run(line(tmp_path, "child", "own"), check=False, timeout=60).returncode == 0
    assert stops.told(tmp_path) == []


TEE = {"staging": "/s", "source_format": "auto", "boot": "b", "state": "/t"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["vllm", "serve", "m"], None),
        (["vllm", LOADER_CONFIG], None),
        (["vllm", LOADER_CONFIG, "{"], None),
        (["vllm", LOADER_CONFIG, "[]"], None),
        (["vllm", LOADER_CONFIG, '{"distributed": true}'], None),
        (["vllm", LOADER_CONFIG, "{}", LOADER_CONFIG, json.dumps(OURS), "-x"], OURS),
        (["vllm", LOADER_CONFIG, json.dumps(TEE)], TEE),
    ],
)
def test_only_what_boot_says_is_listened_to(argv: list[str], expected: object) -> None:
    assert loader_settings(argv) == expected


def leave_note(root: Path, number: int, text: bytes = b"") -> None:
    descriptor = stops.open_note(root, f"b{number}")
    assert descriptor is not None
    os.write(descriptor, text)
    os.close(descriptor)
    os.utime(root / "stops" / f"b{number}", (number, number))


def test_every_boot_in_the_end_of_the_ledger_keeps_its_note(tmp_path: Path) -> None:
    # The smallest lines that an attempt to load can leave; nobody told the servers in between.
    attempt = dict.fromkeys(("pid", "pid_start", "time", "action", "reason"), 1)
    for number in range(0, 1000, 2):
        boot = {"boot": f"b{number}"}
        digests = {"manifest": "0" * 64, "key": "0" * 64, "host_boot": "0" * 36}
        Ledger(tmp_path).append({**boot, "event": "attempt", **digests, **attempt})
        Ledger(tmp_path).append({**boot, "event": "loading", "time": 1, "rank": 0})
        leave_note(tmp_path, number, b"told")
        leave_note(tmp_path, number + 1)
    told = {note["boot"] for note in stops.told(tmp_path)}
    recent = {entry["boot"] for entry in Ledger(tmp_path).recent_about("0" * 64)}
    assert len(recent) == ENOUGH
    assert recent <= told


def test_notes_are_bounded_and_the_newest_of_either_kind_stay(tmp_path: Path) -> None:
    for number in range(1000):
        leave_note(tmp_path, number, b"told" if number % 2 else b"")
    kept = sorted(int(path.name[1:]) for path in (tmp_path / "stops").iterdir())
    odd = [number for number in kept if number % 2]
    even = [number for number in kept if number % 2 == 0]
    # The last one was made for 999, and told later.
    assert odd == list(range(1001 - 2 * (MAX_TOLD + 1), 1000, 2))
    assert even == list(range(1000 - 2 * (MAX_UNTOLD - 1), 1000, 2))


def test_notes_need_no_state_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert stops.open_note(tmp_path / "file", "b") is None
    assert stops.told(tmp_path / "file") == []


def test_one_that_is_forgotten_meanwhile_costs_no_other_note(tmp_path: Path) -> None:
    (tmp_path / "stops").mkdir()
    (tmp_path / "stops" / "b1").write_text("told")
    # As of a file that is deleted once it was listed.
    (tmp_path / "stops" / "b0").symlink_to("nowhere")
    (tmp_path / "stops" / "b2").symlink_to("nowhere")
    assert stops.told(tmp_path) == TOLD
