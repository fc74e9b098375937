from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint.checkpoint.finding import (
    Absent,
    Complete,
    Damaged,
    Finding,
    Foreign,
    Rejected,
    Unreachable,
)
from entrypoint.checkpoint.key import Difference
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import OnFailure, OnMiss
from entrypoint.plan import Action, Obstacle, Policy, Situation, decide, in_words

ABSENT = Absent()
NOT_CONFIGURED = Absent("not configured")
FOREIGN = Foreign("x", (Difference("tp", 2, 4),))
DAMAGED = Damaged("x", ("config.json: missing",))
REJECTED = Rejected("x", "unproven", "tokens differ")
QUARANTINED = Rejected("x", "quarantined", "3 boots died")
UNREACHABLE = Unreachable("I/O error")
BROKEN = Obstacle("copy.broke", "it broke", 30)
NO_SAVE = Obstacle("source.absent", "not here", 31)
WISH = Obstacle("load-format.user", "theirs", is_wish=True)
MUST = Obstacle("engine.noplugin", "no plugin", 1)

NO_TEE = Obstacle("tee.proof", "moe, so it is proved")

ON_MISS: tuple[OnMiss, ...] = ("save", "tee", "source", "refuse")
ON_FAILURE: tuple[OnFailure, ...] = ("serve-source", "refuse")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_checkpoint(tmp_path_factory.mktemp("store"))


def outcome(
    local: Finding = ABSENT,
    shared: Finding = NOT_CONFIGURED,
    on_miss: OnMiss = "save",
    on_failure: OnFailure = "serve-source",
    *,
    no_checkpoint: Obstacle | None = None,
    no_copy: Obstacle | None = None,
    no_save: Obstacle | None = None,
    no_tee: Obstacle | None = None,
    has_source: bool = True,
) -> Action:
    situation = Situation(
        local=local,
        shared=shared,
        no_checkpoint=no_checkpoint,
        no_copy=no_copy,
        no_save=no_save,
        no_tee=no_tee,
        has_source=has_source,
    )
    return decide(situation, Policy(on_miss=on_miss, on_failure=on_failure))


@pytest.mark.parametrize(("on_miss", "on_failure"), list(product(ON_MISS, ON_FAILURE)))
def test_what_the_local_store_has_is_served_under_every_policy(
    manifest: Manifest, on_miss: OnMiss, on_failure: OnFailure
) -> None:
    action = outcome(Complete(manifest, "/l"), UNREACHABLE, on_miss, on_failure, no_copy=BROKEN)
    assert (action.kind, action.reason, action.path) == ("reuse", "local.hit", "/l")
    assert action.manifest is manifest


@pytest.mark.parametrize("local", [Absent(), FOREIGN, DAMAGED, REJECTED, UNREACHABLE])
@pytest.mark.parametrize("on_miss", ON_MISS)
def test_what_only_the_shared_store_has_is_copied(
    manifest: Manifest, local: Finding, on_miss: OnMiss
) -> None:
    action = outcome(local, Complete(manifest, "/s"), on_miss)
    assert (action.kind, action.reason, action.path) == ("copy", "shared.hit", "/s")


@pytest.mark.parametrize(
    ("local", "shared", "reason", "code"),
    [
        (Absent(), NOT_CONFIGURED, "local.absent", 31),
        (Absent(), Absent(), "local.absent", 31),
        (Absent(), FOREIGN, "shared.foreign", 22),
        (Absent(), UNREACHABLE, "shared.unreachable", 30),
        (Absent(), DAMAGED, "shared.damaged", 21),
        (FOREIGN, NOT_CONFIGURED, "local.foreign", 22),
        (FOREIGN, UNREACHABLE, "local.foreign", 22),
        (DAMAGED, FOREIGN, "local.damaged", 21),
        (UNREACHABLE, NOT_CONFIGURED, "local.unreachable", 30),
    ],
)
@pytest.mark.parametrize("on_miss", ON_MISS)
def test_a_miss_is_named_by_the_store_that_came_nearest(
    local: Finding, shared: Finding, reason: str, code: int, on_miss: OnMiss
) -> None:
    action = outcome(local, shared, on_miss)
    kinds = {"save": "save", "tee": "tee", "source": "serve-source", "refuse": "refuse"}
    assert (action.kind, action.reason, action.exit_code) == (kinds[on_miss], reason, code)


@pytest.mark.parametrize(
    ("finding", "reason", "code"),
    [(REJECTED, "unproven", 51), (QUARANTINED, "quarantined", 70)],
)
@pytest.mark.parametrize("where", ["local", "shared"])
@pytest.mark.parametrize(
    ("on_miss", "on_failure", "kind"),
    [
        ("save", "serve-source", "serve-source"),
        ("save", "refuse", "refuse"),
        ("tee", "serve-source", "serve-source"),
        ("source", "serve-source", "serve-source"),
        ("refuse", "serve-source", "refuse"),
    ],
)
def test_what_was_rejected_is_not_made_again(
    finding: Finding,
    reason: str,
    code: int,
    where: str,
    on_miss: OnMiss,
    on_failure: OnFailure,
    kind: str,
) -> None:
    local, shared = (finding, NOT_CONFIGURED) if where == "local" else (Absent(), finding)
    action = outcome(local, shared, on_miss, on_failure)
    assert (action.kind, action.reason, action.exit_code) == (kind, f"{where}.{reason}", code)


@pytest.mark.parametrize(
    ("on_failure", "kind"), [("serve-source", "serve-source"), ("refuse", "refuse")]
)
@pytest.mark.parametrize("on_miss", ON_MISS)
def test_an_obstacle_to_any_checkpoint_goes_by_the_policy_for_failures(
    manifest: Manifest, on_miss: OnMiss, on_failure: OnFailure, kind: str
) -> None:
    action = outcome(
        Complete(manifest, "/l"), NOT_CONFIGURED, on_miss, on_failure, no_checkpoint=MUST
    )
    assert (action.kind, action.reason) == (kind, "engine.noplugin")


@pytest.mark.parametrize(("on_miss", "on_failure"), list(product(ON_MISS, ON_FAILURE)))
def test_what_the_user_asked_for_is_never_refused(on_miss: OnMiss, on_failure: OnFailure) -> None:
    action = outcome(on_miss=on_miss, on_failure=on_failure, no_checkpoint=WISH)
    assert (action.kind, action.reason) == ("serve-source", "load-format.user")


@pytest.mark.parametrize(
    ("on_miss", "on_failure", "kind", "reason"),
    [
        ("save", "serve-source", "save", "copy.broke"),
        ("save", "refuse", "save", "copy.broke"),
        ("tee", "refuse", "tee", "copy.broke"),
        ("source", "serve-source", "serve-source", "copy.broke"),
        ("source", "refuse", "refuse", "copy.broke"),
        ("refuse", "refuse", "refuse", "copy.broke"),
    ],
)
def test_after_a_copy_failed_the_next_choice_names_the_failure(
    manifest: Manifest,
    on_miss: OnMiss,
    on_failure: OnFailure,
    kind: str,
    reason: str,
) -> None:
    shared = Complete(manifest, "/s")
    action = outcome(Absent(), shared, on_miss, on_failure, no_copy=BROKEN)
    assert (action.kind, action.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("on_failure", "kind"), [("serve-source", "serve-source"), ("refuse", "refuse")]
)
@pytest.mark.parametrize("on_miss", ["save", "tee"])
def test_a_save_that_cannot_be_had_goes_by_the_policy_for_failures(
    on_miss: OnMiss, on_failure: OnFailure, kind: str
) -> None:
    action = outcome(on_miss=on_miss, on_failure=on_failure, no_save=NO_SAVE, no_tee=NO_TEE)
    assert (action.kind, action.reason, action.exit_code) == (kind, "source.absent", 31)


@pytest.mark.parametrize(("on_miss", "reason"), [("tee", "tee.proof"), ("save", "local.absent")])
def test_what_cannot_be_saved_on_the_way_is_saved_before(on_miss: OnMiss, reason: str) -> None:
    action = outcome(on_miss=on_miss, no_tee=NO_TEE)
    assert (action.kind, action.reason) == ("save", reason)
    assert ("proved" in action.text) == (on_miss == "tee")


@pytest.mark.parametrize(("on_miss", "on_failure"), list(product(ON_MISS, ON_FAILURE)))
@pytest.mark.parametrize("finding", [Absent(), FOREIGN, DAMAGED])
def test_without_a_source_there_is_nothing_to_fall_back_on(
    finding: Finding, on_miss: OnMiss, on_failure: OnFailure
) -> None:
    action = outcome(
        finding, on_miss=on_miss, on_failure=on_failure, no_save=NO_SAVE, has_source=False
    )
    assert action.kind == "refuse"
    assert action.exit_code


def test_every_chain_of_failures_ends(manifest: Manifest) -> None:
    findings: list[Finding] = [Absent(), FOREIGN, DAMAGED, REJECTED, UNREACHABLE, NOT_CONFIGURED]
    findings.append(Complete(manifest, "/x"))
    for local, shared, on_miss, on_failure in product(findings, findings, ON_MISS, ON_FAILURE):
        no_copy = no_save = None
        kinds = []
        for _ in range(3):
            action = outcome(local, shared, on_miss, on_failure, no_copy=no_copy, no_save=no_save)
            kinds.append(action.kind)
            no_copy = BROKEN if action.kind == "copy" else no_copy
            no_save = BROKEN if action.kind in ("save", "tee") else no_save
        assert kinds[-1] in ("reuse", "serve-source", "refuse"), (local, shared, kinds)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (Absent("why"), "no checkpoint in the local store (why)"),
        (FOREIGN, "tp: wanted 2, found 4"),
        (DAMAGED, "config.json: missing"),
        (REJECTED, "tokens differ"),
        (UNREACHABLE, "I/O error"),
    ],
)
def test_a_finding_is_said_with_its_cause(finding: Finding, words: str) -> None:
    assert words in in_words("local", finding)


def test_a_complete_finding_is_said_by_name(manifest: Manifest, tmp_path: Path) -> None:
    assert manifest.name in in_words("shared", Complete(manifest, str(tmp_path)))
