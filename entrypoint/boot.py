"""The pipeline where all rooms meet: assess → decide → perform → hold → exec.

Root is dropped before any of it (`privilege`): whatever reads a model, asks vLLM or writes into a
store already is the service user.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from entrypoint import compiled, hand_over, record
from entrypoint.assess import Assessment, Boot, assess, doubted
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Complete, Damaged, Rejected
from entrypoint.checkpoint.inspect import ranks_in, verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.engine.executable import locate
from entrypoint.errors import RefusedError, ShardbootError
from entrypoint.hand_over import Program
from entrypoint.log import human_bytes
from entrypoint.plan import Action, Obstacle, decide, in_words, lack
from entrypoint.state.attempts import TIERS, delay_seconds
from entrypoint.store.look import remember_look

NEVER_FAIL_OPEN: Final = (2, 10, 60, 61)
"""Exit codes of usage, configuration and privilege: these must be mended, not survived."""


def new_boot_id() -> str:
    """Return a name for this boot: time for people, a nonce for uniqueness."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def serve(boot: Boot) -> NoReturn:
    """Make sure of a checkpoint and become vLLM on it; or become vLLM on the source; or refuse.

    Raises: RefusedError, and whatever `assess` raises.
    """
    boot.status.phase("deciding")
    assessment = assess(boot)
    if assessment.resolution is not None:
        boot.status.know(address=assessment.resolution.server)
    action, assessment, taken = settle(boot, assessment)
    if action.kind == "refuse":
        hand_over.note(boot, action, assessment, taken)
        raise RefusedError(action.text, reason=action.reason, code=action.exit_code)
    vllm = hand_over.prepare(boot, assessment, action)
    key = assessment.key.digest if assessment.key else None
    name = action.manifest.name if action.manifest else None
    facts: dict[str, Json] = {"action": action.kind, "key": key, "checkpoint": name}
    boot.log.decided(action.reason, _sentence(action), **facts)
    hand_over.become(boot, action, assessment, taken, vllm)


def _sentence(action: Action) -> str:
    match action.kind:
        case "serve-source":
            return f"serving the source: {action.text}"
        case "tee":
            return f"serving the source, and saving a checkpoint on the way: {action.text}"
        case _:
            return action.text


def settle(boot: Boot, assessment: Assessment) -> tuple[Action, Assessment, list[str]]:
    """Take steps until there is a checkpoint to reuse, or only the source or a refusal is left.

    Each kind of step is taken once at most: where what it made does not last, so would the next.
    Return the last action, what was known then, and the reasons of all steps taken.
    """
    taken: list[str] = []
    while True:
        action = decide(assessment.situation, boot.policy)
        if action.kind == "reuse":
            found = _doubt(boot, assessment, action)
            if found is not None:
                assessment = doubted(boot, assessment, found)
                continue
        if action.kind == "tee":
            action, assessment = _begin_tee(boot, assessment, action)
            if action.path is None:
                continue
        if action.kind not in ("copy", "save"):
            return action, assessment, taken
        if any(step.startswith(f"{action.kind}:") for step in taken):
            assessment = _not_again(assessment, action.kind)
            continue
        before, assessment = assessment, _step(boot, assessment, action)
        # A wait that ended because another node has published one was no step.
        if assessment.situation.shared is before.situation.shared:
            taken.append(f"{action.kind}: {action.reason}")


def _not_again(assessment: Assessment, kind: str) -> Assessment:
    """Return the assessment with why a step that this boot has taken stands in its own way."""
    local = assessment.situation.local
    text = f"a {kind} was made in this boot already, and {in_words('local', local)}"
    return _with(assessment, **{f"no_{kind}": lack("local", local, text)})


def _doubt(boot: Boot, assessment: Assessment, action: Action) -> Damaged | Rejected | None:
    """Return why a complete checkpoint is not served after all: its past, or its bytes."""
    manifest = action.manifest
    assert manifest is not None  # reuse always names one
    entries = record.read(boot, manifest)
    found = record.against(boot, assessment, action, entries)
    if isinstance(found, Rejected):
        record.keep(boot, manifest, found)
        return found
    if found:
        seconds = delay_seconds(found)
        text = f"{manifest.name}: {found} boots died while loading it; waiting {seconds:.0f} s"
        boot.log.line("boot.delayed", text)
        boot.status.phase("waiting", text)
        time.sleep(seconds)
    compiled.mend(boot, action, entries)
    if boot.settings.verify == "deep" and (damaged := deep_look(boot, action)):
        boot.log.line("local.damaged", damaged.discrepancies[0])
        return damaged
    return None


def deep_look(boot: Boot, action: Action) -> Damaged | None:
    """Read every byte of the checkpoint that is here; return what is wrong with it."""
    from entrypoint.progress import Progress  # noqa: PLC0415 - most boots read no byte

    assert action.manifest is not None
    manifest, directory = action.manifest, Path(str(action.path))
    held = ranks_in(directory, manifest)
    total = manifest.size_for(held)
    boot.log.line("verify.deep", f"reading {human_bytes(total)} of {manifest.name}")
    tier = boot.status.status.tier or TIERS[action.kind]
    boot.status.phase("verifying", tier=tier, checkpoint=manifest.name)
    with Progress(boot.log, boot.status, "verify", total) as progress:
        wrong = verify_deep(directory, manifest, held, progress.add)
    remember_look(directory, manifest, wrong, boot.memory)
    return Damaged(manifest.name, wrong) if wrong else None


def _with(assessment: Assessment, **changes: Any) -> Assessment:
    situation = assessment.situation._replace(**changes)
    return assessment._replace(situation=situation)


def _step(boot: Boot, assessment: Assessment, action: Action) -> Assessment:
    """Copy or save; return the assessment with what came of it. One process a host at a time.

    Where another node has published what was to be saved, the shared store has it now.
    """
    from entrypoint import steps, turns  # noqa: PLC0415 - a hit takes no step

    boot.log.line(action.reason, f"{action.kind}: {action.text}", action=action.kind)
    boot.status.know(**hand_over.facts(action))
    perform = turns.copy if action.kind == "copy" else turns.save
    try:
        made = steps.alone(boot, assessment, action, perform)
    except ShardbootError as error:
        return _failed(boot, assessment, action, error)
    return _with(assessment, shared=made) if isinstance(made, Complete) else _has(assessment, made)


def _begin_tee(boot: Boot, assessment: Assessment, action: Action) -> tuple[Action, Assessment]:
    """Begin a tee; its action then names the staging, unless the assessment says what came of it.

    That another process is at it, or has made one meanwhile, is told there as well.
    """
    from entrypoint import steps, tee  # noqa: PLC0415 - a hit takes no step

    boot.status.know(**hand_over.facts(action))
    try:
        begun = steps.alone(boot, assessment, action, tee.begin)
    except ShardbootError as error:
        return action, _failed(boot, assessment, action, error)
    match begun:
        case Path():
            return action._replace(path=str(begun)), assessment
        case Obstacle():
            return action, _with(assessment, no_save=begun)
        case _:
            return action, _has(assessment, begun)


def _failed(
    boot: Boot, assessment: Assessment, action: Action, error: ShardbootError
) -> Assessment:
    """Return the assessment after a step that failed. Raises: what must be mended."""
    if error.exit_code in NEVER_FAIL_OPEN:
        raise error
    text = f"{action.kind} failed: {error}"
    boot.log.line(error.reason, text, hint=error.hint)
    obstacle = Obstacle(error.reason, text, error.exit_code)
    return _with(assessment, **{"no_copy" if action.kind == "copy" else "no_save": obstacle})


def _has(assessment: Assessment, made: Manifest) -> Assessment:
    """Return the assessment with a checkpoint that the local store has now."""
    store = assessment.local_store
    return _with(assessment, local=Complete.of(made, store.locate(made.name), store.ranks(made)))


def fall_back(boot: Boot, reason: str, text: str) -> NoReturn:
    """Become vLLM with the user's own words, untouched, for this reason. Raises: ExecError."""
    action = Action("serve-source", reason, text)
    boot.log.decided(reason, text, action=action.kind)
    path = locate(boot.settings.vllm, boot.environ)
    hand_over.become(boot, action, None, (), Program(path, boot.words, boot.environ))
