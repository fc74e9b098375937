"""Foreign data raises nothing but our own errors, in bounded time and memory.

Every reader is fed for its share of FUZZ_SECONDS (600) by a fuzzer that follows coverage.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
from fuzz.mutate import mutate
from fuzz.seeds import Room
from fuzz.targets import TARGETS

DRIVE = Path(__file__).with_name("drive.py")
SECONDS = int(os.environ.get("FUZZ_SECONDS", "600"))
CHANGES = 300
FEWEST_EXECUTIONS = 20
"""A second; a busy machine manages hundreds."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_what_is_good_and_survives_what_was_changed(
    name: str, tmp_path: Path
) -> None:
    room, target = Room(tmp_path / "room"), TARGETS[name]
    seeds = list(target.seeds(room))
    assert target.read(room, seeds[0])
    chance = random.Random(name)  # noqa: S311 - the same changes every time
    for _ in range(CHANGES):
        target.read(room, mutate(chance.choice(seeds), chance))


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_that_a_fuzzer_finds_make_a_reader_fail(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python and platform")
    seconds = max(1, SECONDS // len(TARGETS))
    room, log = tmp_path / "room", tmp_path / "log"
    command = [sys.executable, str(DRIVE), name, str(room), "--seconds", str(seconds)]
    status, _ = processes.run(command, os.environ, log)
    said = log.read_text(errors="replace")
    assert status == 0, (
        f"what was fed lies in {room}; feed it again with --input FILE:\n{said[-4000:]}"
    )
    executions = int(found(r"number_of_executed_units: (\d+)", said)[-1])
    covered = [int(count) for count in found(r" cov: (\d+)", said)]
    record_property("executions", executions)
    record_property("branches", f"{covered[0]} to {covered[-1]}")
    assert executions > FEWEST_EXECUTIONS * seconds


def found(pattern: str, text: str) -> list[str]:
    matches = re.findall(pattern, text)
    assert matches, text[-4000:]
    return matches
