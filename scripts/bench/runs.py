"""Short commands, run over and over beside each other, for benches in milliseconds."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from results import Results

BARE = "bare python"


@dataclass
class Runs:
    """What was measured of one command, in milliseconds. `expected` is its exit status."""

    command: Sequence[str | Path]
    environ: Mapping[str, str]
    expected: int = 0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def once(self) -> None:
        """Run the command and note what it took."""
        started = time.perf_counter()
        process = subprocess.Popen(
            self.command,
            env=self.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, ended, usage = os.wait4(process.pid, 0)
        self.wall.append(1000 * (time.perf_counter() - started))
        self.cpu.append(1000 * (usage.ru_utime + usage.ru_stime))
        process.returncode = os.waitstatus_to_exitcode(ended)
        if process.returncode != self.expected:
            raise SystemExit(f"{self.command}: status {process.returncode}")


def measure(runs: Mapping[str, Runs], rounds: int, results: Results) -> None:
    """Run everything once a round, so that a machine that slows down slows all of it.

    As root, the runs go before everything else that the machine does. `results` gets wall clock
    and processor time, and how long each took over the one called `BARE`.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    for _ in range(rounds):
        for each in runs.values():
            each.once()
    for name, each in runs.items():
        for wall, cpu in zip(each.wall, each.cpu, strict=True):
            results.add("wall clock", name, wall)
            results.add("processor time", name, cpu)
    for name, each in runs.items():
        if name != BARE:
            over = statistics.median(each.wall) - statistics.median(runs[BARE].wall)
            results.note(f"{name}: {over:.1f} ms over a bare start.")


def parser(usage: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the words that all benches without vLLM know."""
    words = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--out", type=Path, help="leave the figures in this folder, as JSON")
    words.add_argument("--rounds", type=int, default=rounds)
    return words
