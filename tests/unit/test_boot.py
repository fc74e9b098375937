"""How a boot takes its steps: each once, and every fact looked up once."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from entrypoint import assess, boot, record, stand_in, steps
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Finding
from entrypoint.config import resolve
from entrypoint.engine.executable import Executable
from entrypoint.log import Log
from entrypoint.model.source import SourceView
from entrypoint.plan import Action, Situation
from entrypoint.state import process, reporter, status
from entrypoint.state.attempts import Entry
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address
from entrypoint.store import lock
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.distant import DistantStore


def a_boot(tmp_path: Path, **settings: str) -> Boot:
    merged = resolve(settings, {"SHARDBOOT_STATE_DIR": str(tmp_path / "state")})
    return Boot(merged, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))


def assessed(store: DirectoryStore, local: Finding, shared: Finding) -> Assessment:
    memory, log = Memory(store.root / "nowhere"), Log("b", descriptor=-1)
    return Assessment(
        engine=Executable("vllm", "python"),
        resolution=None,
        source=SourceView({}, memory, log, lambda *_: None),
        local_store=store,
        shared_store=None,
        situation=Situation(local=local, shared=shared),
    )


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "local")


@pytest.fixture
def complete(local: DirectoryStore) -> Complete:
    manifest = make_checkpoint(local.root)
    return Complete(manifest, str(local.path(manifest.name)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, complete: Complete) -> list[str]:
    """Return the steps that were taken; each makes the same checkpoint."""
    found: list[str] = []

    def alone(_: object, __: object, action: Any, ___: object) -> Any:
        found.append(action.kind)
        return complete.manifest

    monkeypatch.setattr(steps, "alone", alone)
    return found


@pytest.mark.parametrize(
    ("is_shared", "wanted"), [(True, ["copy", "save"]), (False, ["save"])], ids=["shared", "alone"]
)
def test_on_a_disk_that_reads_back_other_bytes_each_step_is_taken_once(
    tmp_path: Path,
    local: DirectoryStore,
    complete: Complete,
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
    is_shared: bool,
    wanted: list[str],
) -> None:
    damaged = Damaged(complete.manifest.name, ("index.json: BLAKE3 is another",))
    # A bound, so that a boot without end fails.
    looks = iter([damaged] * 9)
    monkeypatch.setattr(boot, "deep_look", lambda *_: next(looks))
    this = a_boot(tmp_path, verify="deep")
    before = assessed(local, complete, complete if is_shared else Absent())
    action, _, taken = boot.settle(this, before)
    assert made == wanted
    assert [step.partition(":")[0] for step in taken] == wanted
    assert (action.kind, action.reason, action.exit_code) == ("serve-source", "local.damaged", 21)
    assert "a save was made in this boot already" in action.text
    assert "index.json: BLAKE3 is another" in action.text


def test_reading_every_byte_is_told_as_it_goes(
    tmp_path: Path, local: DirectoryStore, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "PROGRESS_SECONDS", 0.0)
    told = Reporter(tmp_path, "b", Address())
    this = a_boot(tmp_path, verify="deep")._replace(status=told)
    boot.settle(this, assessed(local, complete, Absent()))
    (found,) = status.read_all(tmp_path)
    size = complete.manifest.size
    assert (found.phase, found.tier, found.done, found.total) == ("verifying", "local", size, size)


def test_a_hit_reads_the_ledger_once(
    tmp_path: Path, local: DirectoryStore, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    recent = Ledger.recent_about

    def counted(ledger: Ledger, what: str) -> Any:
        read.append(ledger.root)
        return recent(ledger, what)

    monkeypatch.setattr(Ledger, "recent_about", counted)
    action, _, _ = boot.settle(a_boot(tmp_path), assessed(local, complete, Absent("not looked at")))
    assert action.reason == "local.hit"
    assert len(read) == 1


HERE, ELSEWHERE = process.namespace(), "pid:[1]"


@pytest.mark.parametrize(
    ("namespaces", "is_held", "expected"),
    [
        pytest.param([HERE] * 3, False, 3, id="of this namespace"),
        pytest.param([HERE] * 3, True, 3, id="that die beside others who die, too"),
        pytest.param([ELSEWHERE] * 3, False, 3, id="of another namespace, and nobody holds it"),
        pytest.param([ELSEWHERE] * 3, True, 0, id="of another namespace, and one may hold it"),
        pytest.param([None] * 3, True, 0, id="as older versions noted them"),
        pytest.param([HERE, ELSEWHERE, HERE], True, 2, id="of both"),
    ],
)
def test_only_what_may_still_be_loading_is_excused_by_the_lock(
    complete: Complete, namespaces: list[str | None], is_held: bool, expected: int
) -> None:
    digest, entries = complete.manifest.digest, list[Entry]()
    for number, namespace in enumerate(namespaces):
        attempt = {"boot": str(number), "event": "attempt", "manifest": digest}
        # A pid that there was, at a time when it was not.
        ended = {"pid": os.getpid(), "pid_start": 1, "pid_namespace": namespace}
        entries += [{**attempt, **ended, "host_boot": process.host_boot()}]
        entries += [{"boot": str(number), "event": "loading"}]
    action = Action("reuse", "local.hit", "", manifest=complete.manifest, path=complete.path)
    with ExitStack() as stack:
        if is_held:
            descriptor = lock.hold_manifest(Path(complete.path), digest)
            stack.callback(lock.give_back, descriptor)
        assert record.died_loading(action, entries) == expected


@pytest.mark.parametrize("named", ["tiny", None])
def test_a_shared_store_is_not_asked_for_a_stand_in_that_the_local_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    local, shared = (DirectoryStore(tmp_path / name) for name in ("local", "shared"))
    make_checkpoint(local.root, name="tiny")
    asked: list[str] = []

    def names(store: DistantStore) -> list[str]:
        asked.append(store.where)
        return []

    monkeypatch.setattr(DistantStore, "names", names)
    found = stand_in.find(assess._in_turn(local, shared), named, "org/model", None)
    assert (found.name if found else None) == named
    assert asked == []
    assert stand_in.find(assess._in_turn(local, shared), "other", "org/model", None) is None
    assert asked == [shared.where]
