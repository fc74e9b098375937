"""torch's compiler in a standby: built once, by a process that may be forked afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.vllm_plugin import compiling

pytestmark = pytest.mark.vllm

SCRIPT = """
import os, sys, tempfile
import torch
from entrypoint.vllm_plugin import compiling, forking, learned
before = dict(os.environ)
compiling.build(lambda do: {harmless})
print("torch._inductor.compile_fx" in sys.modules, forking.obstacle() == "")
left = os.listdir(tempfile.gettempdir())
print(dict(os.environ) == before, [name for name in left if name.startswith("shardboot")])
"""


def run(room: Path, harmless: str) -> list[str]:
    # As vLLM sets it.
    environ = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TMPDIR": str(room)}
    command = [sys.executable, "-c", SCRIPT.format(harmless=harmless)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_process_that_has_compiled_may_be_forked_and_keeps_nothing_else(tmp_path: Path) -> None:
    harmless = "learned.harmless(do, forking.obstacle())"
    assert run(tmp_path, harmless) == ["True True", "True []"]


def test_what_is_not_harmless_is_not_done(tmp_path: Path) -> None:
    assert run(tmp_path, "False") == ["False True", "True []"]


def test_servers_that_compile_are_known_by_what_they_import() -> None:
    assert compiling.is_used(["vllm.x", "torch._inductor.compile_fx"])
    assert not compiling.is_used(["torch._dynamo", "torch._inductors"])
