"""A sidecar that has nothing to do for a day grows by nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from releases import many

DRIVER = Path(__file__).with_name("idle_driver.py")
HOURS, WARM = 24, 4
"""After the first hours everything has its size."""

MOST_GROWTH = 1 << 20


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.long)])
def test_a_day_without_work_takes_no_more_of_anything(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Nobody waits for a disk to have them.
        patch.setattr(os, "fsync", lambda _: None)
        many(tmp_path, count)
    places = [str(tmp_path / name) for name in ("local", "shared", "state")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, DRIVER, *places, str(HOURS)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(told) == HOURS + 1
    warm, last = told[WARM], told[-1]
    grown = last["resident"] - warm["resident"]
    print(
        f"{count} checkpoints, {HOURS} h: {grown / 1024:.0f} KiB more, {last['cpu']:.1f} s of CPU"
    )
    assert grown < MOST_GROWTH
    for what in ("descriptors", "threads"):
        assert {each[what] for each in told[WARM:]} == {warm[what]}
