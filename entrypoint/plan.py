"""What boot will do, decided from plain values. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Mapping
from typing import Literal, NamedTuple

from entrypoint.checkpoint.finding import (
    Absent,
    Complete,
    Damaged,
    Finding,
    Foreign,
    Rejected,
    Unreachable,
    word_of,
)
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import OnFailure, OnMiss

Kind = Literal["reuse", "copy", "save", "tee", "serve-source", "refuse"]


class Obstacle(NamedTuple):
    """Why something is not done: its reason code, in words, and the exit code if refused for it.

    `is_wish`: the user's own words ask for it, so that no policy may refuse. `is_remembered`: an
    earlier try found it, so that no boot tries in vain; an operator may.
    """

    reason: str
    text: str
    exit_code: int = 1
    is_wish: bool = False
    is_remembered: bool = False


class Situation(NamedTuple):
    """All that a decision hangs on.

    `no_checkpoint`: why no checkpoint can be served at all. `no_copy`, `no_save`: why that step
    cannot be taken, or how it failed. `no_tee`: why a save must be done before vLLM starts.
    `has_source`: whether vLLM can load the user's model word without a checkpoint.
    """

    local: Finding
    shared: Finding
    no_checkpoint: Obstacle | None = None
    no_copy: Obstacle | None = None
    no_save: Obstacle | None = None
    no_tee: Obstacle | None = None
    has_source: bool = True


class Policy(NamedTuple):
    """What the operator wants where it is a matter of taste."""

    on_miss: OnMiss
    on_failure: OnFailure


class Action(NamedTuple):
    """What boot does next, and why: `reason` is a stable dotted word, `text` one line for people.

    `manifest` and `path` tell which checkpoint, for reuse and copy, and `ranks` which of it lie
    there where not all do; of a tee that has begun `path` is its staging. `exit_code` is what a
    refusal for this reason ends with.
    """

    kind: Kind
    reason: str
    text: str
    manifest: Manifest | None = None
    path: str | None = None
    exit_code: int = 0
    ranks: str = ""


def decide(situation: Situation, policy: Policy) -> Action:
    """Return the next action: the local store, else the shared one, else a save, else the source.

    Calling it again after a step failed, with that step's obstacle, gives the next choice.
    """
    if situation.no_checkpoint:
        return _without(situation, situation.no_checkpoint, policy)
    local, shared = situation.local, situation.shared
    if isinstance(local, Complete):
        are = "are" if local.ranks.startswith("ranks") else "is"
        here = f"{local.ranks} {are} here" if local.ranks else "the local store has it"
        return _of(local, "reuse", "local.hit", here)
    if isinstance(shared, Complete) and not situation.no_copy:
        text = f"{in_words('local', local)}; the shared one has it"
        return _of(shared, "copy", "shared.hit", text)
    why = _miss(local, shared)
    if isinstance(shared, Complete) and situation.no_copy:
        why = situation.no_copy
    match policy.on_miss:
        case "refuse":
            return _refuse(why)
        case "source":
            return _without(situation, why, policy, is_failure=why is situation.no_copy)
        case "save" | "tee":
            if _is_unfit(local) or _is_unfit(shared):
                # A save of the same key would most likely come out the same.
                return _without(situation, why, policy)
            return _saving(situation, why, policy)


def _saving(situation: Situation, why: Obstacle, policy: Policy) -> Action:
    """Save before serving, or on the way, as far as either can be."""
    if situation.no_save:
        text = f"{why.text}; {situation.no_save.text}"
        return _without(situation, situation.no_save._replace(text=text), policy)
    if policy.on_miss == "tee" and situation.no_tee:
        text = f"{why.text}; {situation.no_tee.text}"
        return Action("save", situation.no_tee.reason, text, exit_code=why.exit_code)
    kind: Kind = "tee" if policy.on_miss == "tee" else "save"
    return Action(kind, why.reason, why.text, exit_code=why.exit_code)


def step(situation: Situation, kind: Literal["copy", "save"]) -> Action:
    """Return the one step that an operator asks for, or a refusal saying what stands in its way.

    An operator may save where a boot would not try: a rejected checkpoint gets a successor.
    """
    obstacle = situation.no_copy if kind == "copy" else situation.no_save
    if obstacle is not None and obstacle.is_remembered:
        obstacle = None
    if why := situation.no_checkpoint or obstacle:
        return _refuse(why)
    if kind == "save":
        return Action(kind="save", reason="operator", text=in_words("local", situation.local))
    if isinstance(situation.shared, Complete):
        return _of(situation.shared, "copy", "shared.hit", "the shared store has it")
    return _refuse(lack("shared", situation.shared, in_words("shared", situation.shared)))


def _is_unfit(finding: Finding) -> bool:
    """Tell what another save would most likely share; that nobody proved it yet is no fault."""
    return isinstance(finding, Rejected) and finding.kind != "unproved"


def _of(found: Complete, kind: Kind, reason: str, text: str) -> Action:
    name = found.manifest.name
    return Action(
        kind=kind,
        reason=reason,
        text=f"{name}: {text}",
        manifest=found.manifest,
        path=found.path,
        ranks=found.ranks,
    )


def _without(
    situation: Situation, why: Obstacle, policy: Policy, *, is_failure: bool = True
) -> Action:
    """Serve the source, unless there is none, or the policy is to refuse what failed."""
    must_refuse = is_failure and not why.is_wish and policy.on_failure == "refuse"
    if must_refuse or not situation.has_source:
        return _refuse(why)
    return Action(kind="serve-source", reason=why.reason, text=why.text, exit_code=why.exit_code)


def _refuse(why: Obstacle) -> Action:
    return Action(kind="refuse", reason=why.reason, text=why.text, exit_code=why.exit_code)


# 70: do not restart.
_REJECTED_EXIT_CODES: Mapping[str, int] = {"quarantined": 70}
_MISS_EXIT_CODES: Mapping[str, int] = {
    "absent": 31,
    "foreign": 22,
    "damaged": 21,
    "unreachable": 30,
}


def _miss(local: Finding, shared: Finding) -> Obstacle:
    """Say why neither store serves, by the code of the one that came nearest."""
    text = in_words("local", local)
    if shared != Absent("not configured"):
        text += f"; {in_words('shared', shared)}"
    if isinstance(local, Absent) and not isinstance(shared, Absent):
        return lack("shared", shared, text)
    return lack("local", local, text)


def lack(store: str, finding: Finding, text: str) -> Obstacle:
    """Return why one store does not serve, by its finding's own code."""
    if isinstance(finding, Rejected):
        code = _REJECTED_EXIT_CODES.get(finding.kind, 51)
        return Obstacle(f"{store}.{finding.kind}", text, code)
    word = word_of(finding)
    return Obstacle(f"{store}.{word}", text, _MISS_EXIT_CODES.get(word, 1))


def in_words(store: str, finding: Finding) -> str:
    """Return one clause about what a look at a store gave."""
    match finding:
        case Complete(manifest=manifest):
            return f"the {store} store has {manifest.name}"
        case Absent(why=why):
            return f"no checkpoint in the {store} store" + (f" ({why})" if why else "")
        case Foreign(name=name, differences=differences):
            fields = ", ".join(
                f"{d.field}: wanted {d.wanted}, found {d.found}" for d in differences[:3]
            )
            return f"the {store} store's nearest, {name}, is foreign ({fields})"
        case Damaged(name=name, discrepancies=discrepancies):
            return f"the {store} store's {name} is damaged ({discrepancies[0]})"
        case Rejected(name=name, reason=reason):
            return f"the {store} store's {name} was rejected ({reason})"
        case Unreachable(error=error):
            return f"the {store} store is unreachable ({error})"
