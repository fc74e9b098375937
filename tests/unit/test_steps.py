"""What the steps of a boot say of themselves while they are at it, and what a proof leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import make_checkpoint, make_key, proof_of

from entrypoint import prover, proving, publishing, steps
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Finding, Rejected
from entrypoint.config import resolve
from entrypoint.engine.executable import Executable
from entrypoint.errors import OwnershipError
from entrypoint.log import Log
from entrypoint.plan import Action, Situation
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
    with local.stage(manifest.name, manifest.content) as staging:
        ranks = manifest.layout.ranks
        publishing.transport(boot, shared, staging, manifest, ranks, verb, local.where)
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
    monkeypatch.setattr(prover, "prove", lambda *_: proof_of(manifest))
    settings = resolve({}, {"SHARDBOOT_STATE_DIR": str(state)})
    boot = Boot(settings, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))
    known = SimpleNamespace(
        resolution=SimpleNamespace(nnodes=1),
        engine=object(),
        local_store=DirectoryStore(tmp_path / "local", 0o750, 0o640),
        situation=SimpleNamespace(local=Rejected(manifest.name, "unproven", "tokens differ")),
    )
    return boot, cast("Assessment", known)


def test_a_proof_is_kept_and_takes_the_rejection_back(bench: tuple[Boot, Assessment]) -> None:
    state = bench[0].settings.state_dir
    manifest = proving.prove_here(*bench)
    assert Proofs(state).find(manifest) == proof_of(manifest)
    assert Rejections(state).find(manifest.content) is None


def test_a_proof_that_cannot_be_kept_is_an_error_of_ours(bench: tuple[Boot, Assessment]) -> None:
    state = bench[0].settings.state_dir
    (state / "proofs").write_text("no directory")
    with pytest.raises(OwnershipError, match=f"{state}: the proof cannot be kept") as caught:
        proving.prove_here(*bench)
    assert "service user" in caught.value.hint


@pytest.mark.parametrize(
    ("before", "is_made"),
    [
        (Absent(), False),
        (Damaged("tiny", ("a bit flipped",)), True),
        (Damaged("other", ("a bit flipped",)), False),
        (Rejected("tiny", "quarantined", "3 boots died"), True),
        (Rejected("other", "quarantined", "3 boots died"), False),
        (Rejected("tiny", "unproved", "no proof yet"), False),
    ],
    ids=["absent", "damaged", "another damaged", "given up", "another given up", "unproved"],
)
def test_what_lies_there_is_made_by_another_process_unless_this_boot_knows_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Finding, is_made: bool
) -> None:
    there, fresh = (make_checkpoint(tmp_path / name, name="tiny") for name in ("local", "fresh"))
    local = DirectoryStore(tmp_path / "local")
    assessment = Assessment(
        engine=Executable("vllm", "python"),
        resolution=cast("Any", SimpleNamespace(key=make_key(), model_word="org/model")),
        source=cast("Any", None),
        local_store=local,
        shared_store=None,
        situation=Situation(local=before, shared=Absent()),
    )
    found = Situation(local=Complete(there, str(local.path("tiny"))), shared=Absent())
    monkeypatch.setattr(steps, "assess_again", lambda _: assessment._replace(situation=found))
    settings = resolve({"local_dir": str(local.root)}, {})
    boot = Boot(settings, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))
    action = Action("copy", "shared.hit", "")
    made = steps.alone(boot, assessment, action, lambda *_: fresh)
    assert made is (fresh if is_made else there)
