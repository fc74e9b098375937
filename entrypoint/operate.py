"""Operator commands: the same decision as `serve`, one step of it, or a look at the stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, assert_never

import click

from entrypoint import steps
from entrypoint.assess import Assessment, Boot, assess
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import (
    Absent,
    Complete,
    Damaged,
    Finding,
    Foreign,
    Rejected,
    Unreachable,
)
from entrypoint.checkpoint.inspect import verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import Settings
from entrypoint.errors import (
    ConfigError,
    DamagedError,
    ManifestError,
    NotFoundError,
    RefusedError,
    ShardbootError,
)
from entrypoint.log import human_bytes
from entrypoint.options import WordsCommand, new_boot, read_settings, with_settings
from entrypoint.plan import Action, decide, in_words
from entrypoint.state.memory import Memory
from entrypoint.store.base import open_store
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import check, find_by_name

with_format = click.option(
    "--format", "output", type=click.Choice(["text", "json"]), default="text", help="how to print"
)


def emit(output: str, value: Json, text: str) -> None:
    """Print a result for programs or for people."""
    click.echo(json.dumps(value, indent=2) if output == "json" else text)


@click.command(cls=WordsCommand)
@with_format
@with_settings
@click.pass_context
def plan(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Say what `serve` would do, and why. Changes nothing but memory."""
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"], touches_store=False)
    assessment = assess(this)
    action = decide(assessment.situation, this.policy)
    emit(output, plan_json(assessment, action), plan_text(assessment, action))


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
        case Complete(manifest=manifest, path=path):
            rest = {"name": manifest.name, "path": path}
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
    return {"finding": finding.word, **rest}


def plan_text(assessment: Assessment, action: Action) -> str:
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
    return "\n".join(f"{name:<8}{value}" for name, value in rows)


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
    _one_step(ctx, flags, output, "copy", steps.copy_here)


def _one_step(
    ctx: click.Context,
    flags: dict[str, Any],
    output: str,
    kind: str,
    perform: Callable[[Boot, Assessment, Action], Manifest],
) -> None:
    this = new_boot(flags, ctx.obj["words"], ctx.obj["environ"])
    assessment = assess(this)
    action = decide(assessment.situation, this.policy)
    # `save` makes one although the shared store has it: the operator asked for that step.
    may_save = kind == "save" and action.kind == "copy" and not assessment.situation.no_save
    if action.kind == "reuse" and action.manifest is not None:
        manifest, outcome = action.manifest, "existed"
    elif action.kind == kind or may_save:
        manifest, outcome = steps.alone(this, assessment, action, perform), "made"
    else:
        raise RefusedError(action.text, reason=action.reason, code=action.exit_code or 31)
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
    manifest = steps.wanted_checkpoint(this, assessment)
    published = steps.push(this, assessment, manifest)
    value: Json = {"checkpoint": {"name": published.name}}
    emit(output, value, f"{published.name}: in the shared store")


def store_of(settings: Settings, *, shared: bool) -> DirectoryStore:
    """Return the store that a command looks after. Raises: ConfigError."""
    modes = {"dir_mode": settings.dir_mode, "file_mode": settings.file_mode}
    if not shared:
        return DirectoryStore(settings.local_dir, **modes)
    if settings.shared is None:
        msg = "there is no shared store"
        raise ConfigError(msg, hint="name it with SHARDBOOT_SHARED")
    return open_store(settings.shared, **modes)


def for_stores(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what looking after a store takes: which one, where, and how to print."""
    shared = click.option(
        "--shared", "in_shared", is_flag=True, help="the shared store (SHARDBOOT_SHARED)"
    )
    places = with_settings(command, only=("local_dir", "state_dir"))
    return with_format(shared(places))


@click.command("list")
@for_stores
@click.pass_context
def list_(ctx: click.Context, /, output: str, in_shared: bool, **flags: Any) -> None:
    """List all complete checkpoints, newest first."""
    store = store_of(read_settings(flags, ctx.obj["environ"]), shared=in_shared)
    rows: list[Json] = []
    lines: list[str] = []
    for name in store.names():
        try:
            manifest = find_by_name(store, name, store.where)
        except (ManifestError, NotFoundError) as error:
            rows.append({"name": name, "error": str(error)})
            lines.append(f"{name}  unreadable: {error}")
            continue
        rows.append(
            {
                "name": name,
                "bytes": manifest.size,
                "files": len(manifest.files),
                "created_at": manifest.created_at,
                "manifest": manifest.digest,
            }
        )
        lines.append(f"{name}  {human_bytes(manifest.size)}  {manifest.created_at}")
    emit(output, rows, "\n".join(lines) or f"{store.where}: no checkpoints")


@click.command()
@click.argument("name")
@for_stores
@click.pass_context
def show(ctx: click.Context, /, name: str, output: str, in_shared: bool, **flags: Any) -> None:
    """Show what a checkpoint is: key, source, layout, files."""
    store = store_of(read_settings(flags, ctx.obj["environ"]), shared=in_shared)
    manifest = find_by_name(store, name, store.where)
    document = manifest.to_json() | {"blake3": manifest.digest, "path": str(store.path(name))}
    lines = [f"{manifest.name}", f"  source  {manifest.source.name}"]
    lines += [f"  {field:<20}{value}" for field, value in manifest.key.to_json().items() if value]
    lines += [f"  {human_bytes(entry.size):>10}  {entry.path}" for entry in manifest.files]
    emit(output, document, "\n".join(lines))


@click.command()
@click.argument("name", required=False)
@click.option("--deep", is_flag=True, help="read every byte, not only sizes and headers")
@for_stores
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    name: str | None,
    deep: bool,
    output: str,
    in_shared: bool,
    **flags: Any,
) -> None:
    """Check one checkpoint, or all, against their manifests. Exit 21 if any is damaged."""
    settings = read_settings(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    results = {
        each: _verify_one(store, each, deep=deep, memory=Memory(settings.state_dir))
        for each in ([name] if name else store.names())
    }
    value: Json = [{"name": n, "discrepancies": list(wrong)} for n, wrong in results.items()]
    text = "\n".join(f"{n}: {wrong[0] if wrong else 'complete'}" for n, wrong in results.items())
    emit(output, value, text or f"{store.where}: no checkpoints")
    damaged = [n for n, wrong in results.items() if wrong]
    if damaged:
        msg = f"{store.where}: damaged: {', '.join(damaged)}"
        raise DamagedError(msg, hint="boot copies or saves it again under the next generation")


def _verify_one(store: DirectoryStore, name: str, *, deep: bool, memory: Memory) -> tuple[str, ...]:
    try:
        manifest = find_by_name(store, name, store.where)
    except NotFoundError:
        raise
    except ShardbootError as error:
        return (str(error),)
    if deep:
        return verify_deep(store.path(name), manifest, manifest.layout.ranks)
    finding = check(store.path(name), manifest, memory)
    match finding:
        case Damaged(discrepancies=wrong):
            return wrong
        case Unreachable(error=text):
            return (text,)
        case _:
            return ()


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (plan, save, pull, push, list_, show, verify)
}
