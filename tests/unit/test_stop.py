"""What a server that is told to stop leaves in the ledger, whatever it does then."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.state.ledger import Ledger
from entrypoint.vllm_plugin.stop import LOADER_CONFIG, loader_settings

OURS = {"manifest": "m", "boot": "b1", "state": "/s"}

SERVER = """
import multiprocessing, os, signal, sys, threading
def own(number, frame):
    raise SystemExit(7)
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, own)
from entrypoint.vllm_plugin import register
register(); register()
def tell():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
if "child" in sys.argv:
    child = multiprocessing.get_context("fork").Process(target=lambda: (register(), tell()))
    child.start()
    child.join()
else:
    tell()
"""


def end(state: Path, *words: str) -> tuple[int, list[str]]:
    """Run a server that is told to stop; return its status and the events that were noted."""
    config = json.dumps(OURS | {"state": str(state)})
    line = [sys.executable, "-c", SERVER, *words, LOADER_CONFIG, config]
    status = subprocess.run(line, check=False, timeout=60).returncode
    return status, [str(entry["event"]) for entry in Ledger(state).entries()]


@pytest.mark.parametrize(("words", "status"), [((), -signal.SIGTERM), (("own",), 7)])
def test_a_server_that_is_told_to_stop_says_so_and_does_as_it_would(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    assert end(tmp_path, *words) == (status, ["stopped"])


def test_a_child_that_is_ended_says_nothing_since_its_parent_may_do_so_for_any_reason(
    tmp_path: Path,
) -> None:
    assert end(tmp_path, "child", "own") == (0, [])


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
