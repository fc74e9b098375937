"""What the steps of a boot say of themselves while they are at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint import steps
from entrypoint.assess import Boot
from entrypoint.config import resolve
from entrypoint.log import Log
from entrypoint.state import reporter, status
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address, Status
from entrypoint.store.directory import DirectoryStore


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """Return every status that is written, as if each write were a second later."""
    found: list[Status] = []
    monkeypatch.setattr(reporter, "PROGRESS_SECONDS", -1.0)
    monkeypatch.setattr(status, "write", lambda _, each: found.append(each))
    return found


@pytest.mark.parametrize(("verb", "phase"), [("copy", "copying"), ("push", "publishing")])
def test_a_copy_tells_how_many_bytes_are_there_of_how_many(
    tmp_path: Path, written: list[Status], verb: str, phase: str
) -> None:
    (tmp_path / "local").mkdir()
    manifest = make_checkpoint(tmp_path / "shared")
    shared, local = (DirectoryStore(tmp_path / name, 0o750, 0o640) for name in ("shared", "local"))
    settings = resolve({}, {"SHARDBOOT_LOG_FORMAT": "text"})
    report = Reporter(tmp_path, "b", Address())
    boot = Boot(settings, (), {}, Log("b", descriptor=-1), report)
    steps.transport(boot, shared, local, manifest, verb)
    assert {each.phase for each in written} == {phase}
    assert (written[0].done, written[0].total) == (0, 0)
    assert (written[-1].done, written[-1].total) == (manifest.size, manifest.size)
    assert [each.done for each in written] == sorted(each.done for each in written)
