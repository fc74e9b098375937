"""What the steps of a boot say of themselves while they are at it, and what a proof leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from checkpoints import make_checkpoint

from entrypoint import prover, steps
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.finding import Rejected
from entrypoint.config import resolve
from entrypoint.errors import OwnershipError
from entrypoint.log import Log
from entrypoint.state import reporter, status
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections
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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Boot, Assessment]:
    """Return a local checkpoint that failed an earlier proof, and will now pass one."""
    manifest = make_checkpoint(tmp_path / "local")
    state = tmp_path / "state"
    Rejections(state).add(manifest.content, "unproven", "tokens differ")
    monkeypatch.setattr(prover, "prove", lambda *_: {"items": 1})
    settings = resolve({}, {"SHARDBOOT_STATE_DIR": str(state)})
    boot = Boot(settings, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))
    known = SimpleNamespace(
        resolution=object(),
        engine=object(),
        local_store=DirectoryStore(tmp_path / "local", 0o750, 0o640),
        situation=SimpleNamespace(local=Rejected(manifest.name, "unproven", "tokens differ")),
    )
    return boot, cast("Assessment", known)


def test_a_proof_is_kept_and_takes_the_rejection_back(bench: tuple[Boot, Assessment]) -> None:
    state = bench[0].settings.state_dir
    manifest = steps.prove_here(*bench)
    assert Proofs(state).find(manifest.content) == {"items": 1}
    assert Rejections(state).find(manifest.content) is None


def test_a_proof_that_cannot_be_kept_is_an_error_of_ours(bench: tuple[Boot, Assessment]) -> None:
    state = bench[0].settings.state_dir
    (state / "proofs").write_text("no directory")
    with pytest.raises(OwnershipError, match=f"{state}: the proof cannot be kept") as caught:
        steps.prove_here(*bench)
    assert "service user" in caught.value.hint
