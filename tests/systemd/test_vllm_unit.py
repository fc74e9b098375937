"""Real vLLM in the unit: what its sandbox must not forbid shows here, and so does a deaf worker."""

from __future__ import annotations

import time

import pytest
from models import make_model
from serving import FLAGS, environment, free_port
from systemd.harness import INSTALL, START, Machine, binary

pytestmark = [pytest.mark.long, pytest.mark.vllm]

UNIT = "shardboot@tiny"
SECONDS = 600


def test_a_worker_that_dies_is_a_local_hit_of_the_whole_unit(machine: Machine) -> None:
    machine.type(INSTALL)
    make_model("dense", machine.models / "tiny")
    machine.install({"vllm": binary("vllm")})
    words = [*FLAGS, "-tp 2", "--host 127.0.0.1", f"--port {free_port()}"]
    mine = "\n".join([" ".join(words), *variables(), ""])
    started = time.monotonic()
    machine.type(START.replace("llama", "tiny").replace("-tp 8\n", mine), seconds=SECONDS)
    shown = machine.show(UNIT)
    assert shown["ActiveState"] == "active"
    print(f"{shown['StatusText']} after {time.monotonic() - started:.0f} s")
    assert shown["StatusText"].startswith("serving: saved on ")

    before = machine.processes(UNIT)
    machine.type(f"kill -KILL {worker(machine, before)}")
    killed = time.monotonic()
    shown = machine.wait_until(UNIT, SECONDS, NRestarts="1", ActiveState="active")
    print(f"{shown['StatusText']} {time.monotonic() - killed:.0f} s after a worker was killed")
    assert shown["StatusText"].startswith("serving: local on ")
    assert not set(before) & set(machine.processes(UNIT))

    stopping = time.monotonic()
    machine.type(f"systemctl stop {UNIT}")
    print(f"stopped after {time.monotonic() - stopping:.1f} s")
    shown = machine.show(UNIT)
    assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success")
    assert machine.run("ls", "/dev/shm") == ""  # noqa: S108 - vLLM's


def variables() -> list[str]:
    kept = environment(2).items()
    return [f"{n}={v}" for n, v in kept if n.startswith("VLLM_") or n == "HF_HUB_OFFLINE"]


def worker(machine: Machine, pids: list[int]) -> int:
    """Return one of vLLM's workers, which it names so."""
    names = {pid: machine.run("cat", f"/proc/{pid}/cmdline", check=False) for pid in pids}
    return next(pid for pid, name in names.items() if "Worker" in name)
