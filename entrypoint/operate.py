"""Commands that take a boot apart: the same decision as `serve`, or one step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, assert_never

import click

from entrypoint import compiled, proving, publishing, record, steps, turns
from entrypoint.assess import Assessment, Boot, assess, doubted
from entrypoint.checkpoint.digest import Json
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
from entrypoint.errors import RefusedError
from entrypoint.options import WordsCommand, emit, with_format, with_settings
from entrypoint.plan import Action, decide, in_words, step
from entrypoint.start import new_boot


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def plan(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Say what `serve` would do, and why. Changes nothing, but remembers what vLLM answered."""
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"], touches_store=False)
    assessment = assess(this)
    action = decide(assessment.situation, this.policy)
    if action.kind == "reuse" and action.manifest is not None:
        entries = record.read(this, action.manifest)
        found = record.against(this, assessment, action, entries)
        if isinstance(found, Rejected):
            assessment = doubted(this, assessment, found)
            action = decide(assessment.situation, this.policy)
    emit(output, plan_json(assessment, action), *plan_lines(assessment, action))


def plan_json(assessment: Assessment, action: Action) -> Json:
    """Return the plan as scripts rely on it."""
    situation = assessment.situation
    findings = {"local": situation.local, "shared": situation.shared}
    foreign = [f for f in findings.values() if isinstance(f, Foreign)]
    nearest = min(foreign, key=lambda f: len(f.differences), default=None)
    checkpoint: Json = None
    if action.manifest is not None:
        checkpoint = {"name": action.manifest.name, "path": action.path}
    key = assessment.key
    return {
        "action": action.kind,
        "reason": action.reason,
        "text": action.text,
        "checkpoint": checkpoint,
        "key": key.to_json() if key else None,
        "findings": {store: finding_json(finding) for store, finding in findings.items()},
        "differences": [d.to_json() for d in nearest.differences] if nearest else [],
    }


def finding_json(finding: Finding) -> dict[str, Json]:
    """Return one finding: its word, and what it has to say."""
    rest: dict[str, Json]
    match finding:
        case Complete(manifest=manifest, path=path, ranks=ranks):
            rest = {"name": manifest.name, "path": path}
            if ranks:
                rest["ranks"] = ranks
        case Absent(why=why):
            rest = {"why": why}
        case Foreign(name=name, differences=differences):
            rest = {"name": name, "differences": [d.to_json() for d in differences]}
        case Damaged(name=name, discrepancies=discrepancies):
            rest = {"name": name, "discrepancies": list(discrepancies)}
        case Rejected(name=name, kind=kind, reason=reason):
            rest = {"name": name, "kind": kind, "reason": reason}
        case Unreachable(error=error):
            rest = {"error": error}
        case _:
            assert_never(finding)
    return {"finding": word_of(finding), **rest}


def plan_lines(assessment: Assessment, action: Action) -> list[str]:
    """Return the plan as a small table."""
    situation = assessment.situation
    key = assessment.key
    rows = [
        ("action", action.kind),
        ("reason", f"{action.reason}: {action.text}"),
        ("local", in_words("local", situation.local)),
        ("shared", in_words("shared", situation.shared)),
        ("key", key.digest[:12] if key and key.model else "not known yet"),
    ]
    return [f"{name:<8}{value}" for name, value in rows]


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def save(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Save a checkpoint from the source, unless the local store has it."""
    _one_step(ctx, flags, output, "save", steps.save_here)


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def pull(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Copy the checkpoint from the shared store, unless the local store has it."""
    _one_step(ctx, flags, output, "copy", turns.copy)


def _one_step(
    ctx: click.Context,
    flags: dict[str, Any],
    output: str,
    kind: Literal["copy", "save"],
    perform: Callable[[Boot, Assessment, Action], Manifest],
) -> None:
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"])
    assessment = assess(this)
    situation = assessment.situation
    if isinstance(situation.local, Complete):
        manifest, outcome, path = situation.local.manifest, "existed", situation.local.path
    else:
        action = step(situation, kind)
        if action.kind == "refuse":
            raise RefusedError(action.text, reason=action.reason, code=action.exit_code)
        manifest, outcome = steps.alone(this, assessment, action, perform), "made"
        path = str(assessment.local_store.path(manifest.name))
    value: Json = {"outcome": outcome, "checkpoint": {"name": manifest.name, "path": path}}
    emit(output, value, f"{path}: {outcome}")


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def push(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Copy the local checkpoint that fits to the shared store."""
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"])
    assessment = assess(this)
    manifest = publishing.wanted_checkpoint(this, assessment)
    published = publishing.push(this, assessment, manifest)
    if this.settings.publish_caches:
        assert assessment.shared_store is not None
        here = assessment.local_store.path(manifest.name)
        compiled.publish(this, assessment.shared_store, here, manifest, published.name)
    value: Json = {"checkpoint": {"name": published.name}}
    emit(output, value, f"{published.name}: in the shared store")


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def prove(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Prove that the local checkpoint loads to the source's state. Exit 51 if it does not."""
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"])
    manifest = proving.prove_here(this, assess(this))
    value: Json = {"checkpoint": {"name": manifest.name}, "proved": True}
    emit(output, value, f"{manifest.name}: loads to the source's state")


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (plan, save, pull, push, prove)
}
