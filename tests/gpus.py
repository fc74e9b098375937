"""A machine with GPUs and a vLLM: what scripts/gpu-* look for, and have it do."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from serving import environment

from entrypoint.engine.executable import Executable, find
from entrypoint.errors import ShardbootError

GPU_WORDS: Final = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 28))
"""A fixed KV cache: vLLM gives up when others take or give back memory while it measures."""

PROBE: Final = """
import importlib.metadata, json, torch
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
print(json.dumps({"vllm": version("vllm"), "shardboot": version("shardboot"), "gpus": gpus}))
"""
MAKE: Final = """
import json, sys
from pathlib import Path
from models import make_model
for kind, hidden in json.load(sys.stdin): make_model(kind, Path(sys.argv[1], kind), hidden=hidden)
"""


class NothingRanError(Exception):
    """There is nothing to run on, or with; the message says what is lacking."""


class Machine(NamedTuple):
    """What proves: vLLM and its Python, in their versions, and the GPUs that it sees."""

    engine: Executable
    about: Mapping[str, Any]
    on_cpu: bool

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return len(self.about["gpus"])

    def environ(self, tp: int) -> dict[str, str]:
        """Return the environment of a save, with nothing of ours in it."""
        if self.on_cpu:
            return environment(tp)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SHARDBOOT")}
        return kept | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def __str__(self) -> str:
        gpus = "the CPU alone" if self.on_cpu else ", ".join(self.about["gpus"])
        versions = f"vLLM {self.about['vllm']}, shardboot {self.about['shardboot']}"
        return f"{versions}, {gpus}, {dt.datetime.now(dt.UTC):%Y-%m-%d}"


def look(vllm: str, end: float, *, on_cpu: bool) -> Machine:
    """Look for vLLM, shardboot and GPUs. Raises: NothingRanError."""
    try:
        engine = find(vllm, os.environ)
    except ShardbootError as error:
        raise NothingRanError(str(error)) from None
    about = json.loads(have(engine, "look for GPUs", end, "-P", "-c", PROBE))
    for name in ("vllm", "shardboot"):
        if about[name] is None:
            raise NothingRanError(f"{engine.interpreter} has no {name}: install it there")
    if not about["gpus"] and not on_cpu:
        raise NothingRanError(f"the torch of {engine.interpreter} sees no GPU")
    return Machine(engine, about, on_cpu)


def have(engine: Executable, do: str, end: float, *words: str, **how: Any) -> str:
    """Have vLLM's Python do something, until `end`; return its stdout. Raises: NothingRanError."""
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [engine.interpreter, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=end - time.monotonic(),
            **how,
        )
    except subprocess.TimeoutExpired:
        raise NothingRanError(f"no time left for {engine.interpreter} to {do}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word why"])[-1]
        raise NothingRanError(f"{engine.interpreter} cannot {do}: {last}")
    return done.stdout


def make_models(
    sizes: Sequence[tuple[str, int]], machine: Machine, directory: Path, end: float
) -> None:
    """Make models by kind and hidden size, all in one process. Raises: NothingRanError."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    words = ("-c", MAKE, str(directory))
    have(machine.engine, "make models", end, *words, input=json.dumps(sizes), env=environ)
