"""What a supervisor makes of a server that one of its processes has left."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.supervise import health
from entrypoint.supervise.health import Health


@pytest.fixture
def looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Health:
    """A server that has not served yet, and is healthy at the next look."""
    address = SimpleNamespace(headless=False)
    status = SimpleNamespace(phase="starting", address=address, done=0)
    log = SimpleNamespace(boot="one")
    boot: Any = SimpleNamespace(
        settings=SimpleNamespace(state_dir=tmp_path), log=log, status=SimpleNamespace(status=status)
    )
    standing = SimpleNamespace(phase="serving", line="serving", is_healthy=True)
    monkeypatch.setattr(health, "check", lambda *_: SimpleNamespace(standing=standing))
    return Health(boot, {}, math.inf)


def test_before_it_serves_it_has_time_to_end_by_itself(looked_after: Health) -> None:
    looked_after.alarm()
    assert not looked_after.is_lost


def test_one_that_has_not_ended_by_then_is_lost(
    looked_after: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FALL_SECONDS", -1.0)
    looked_after.alarm()
    assert looked_after.is_lost


def test_one_that_serves_in_the_end_is_not_but_looked_at_closely(
    looked_after: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FALL_SECONDS", -1.0)
    looked_after.alarm()
    looked_after.look(None, is_ending=False)
    assert looked_after.served_since is not None
    assert not looked_after.is_lost
    assert looked_after.alarmed_until > looked_after.served_since
