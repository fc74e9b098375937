"""Commands that decide what stays in a store: collect what nobody needs, pin what must stay."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from entrypoint.checkpoint.digest import Json
from entrypoint.config import Settings
from entrypoint.errors import OwnershipError
from entrypoint.inventory import directory_of, for_stores, store_of
from entrypoint.log import human_bytes
from entrypoint.options import emit, with_settings
from entrypoint.start import settings_as_user
from entrypoint.store import leftovers, pins
from entrypoint.store.base import CheckpointStore
from entrypoint.store.collect import Collection, collect
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import find_by_name
from entrypoint.store.retention import Rules, Verdict

with_limits = functools.partial(with_settings, only=("grace", "shared_grace", "cache_bytes"))


@click.command()
@click.option("--dry-run", is_flag=True, help="only say what would go, and why")
@for_stores
@with_limits
@click.pass_context
def gc(ctx: click.Context, /, dry_run: bool, output: str, in_shared: bool, **flags: Any) -> None:
    """Collect checkpoints, vLLM's caches, staging and trash that nobody needs any more.

    Of a bucket: only what dead pushes have left, and caches without a checkpoint.
    """
    settings = settings_as_user(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    rules = rules_for(settings, shared=in_shared)
    if isinstance(store, DirectoryStore):
        done = collect(store, settings.state_dir, rules, dry_run=dry_run)
    else:
        sweep = leftovers.leftovers if dry_run else leftovers.sweep
        done = Collection((), tuple(sweep(store, rules.grace)), ())
    kept = _caches(settings, store if in_shared else None, dry_run=dry_run)
    lines = _lines(done, kept, dry_run=dry_run) or [f"{store.where}: nothing to collect"]
    emit(output, _as_json(done, kept, dry_run=dry_run), *lines)
    denied = [each.text for each in done.verdicts if each.reason == "denied"]
    denied += [each.text for each in done.stayed if each.reason == "denied"]
    if denied:
        msg = f"{denied[0]}; {len(denied)} to collect, but this user may not"
        raise OwnershipError(msg, hint="run gc as the user who owns the store")


def _caches(settings: Settings, shared: CheckpointStore | None, *, dry_run: bool) -> list[Verdict]:
    """Return verdicts on what vLLM has compiled for checkpoints, of this node or a shared store."""
    from entrypoint.caches.collect import collect as collect_caches  # noqa: PLC0415 - gc's alone
    from entrypoint.caches.shared import collect_shared  # noqa: PLC0415
    from entrypoint.caches.shelf import shelf_of  # noqa: PLC0415

    if shared is None:
        state, local, most = settings.state_dir, settings.local_dir, settings.cache_bytes
        return collect_caches(state, local, settings.grace, most, dry_run=dry_run)
    names, grace = shared.names(), settings.shared_grace
    return collect_shared(shelf_of(shared), names, grace, time.time(), dry_run=dry_run)


def rules_for(settings: Settings, *, shared: bool) -> Rules:
    """Return how long things stay in a store; in a shared one other nodes cannot be asked."""
    if shared:
        return Rules(grace=settings.shared_grace, settle=settings.shared_grace)
    return Rules(grace=settings.grace)


def _as_json(done: Collection, caches: Sequence[Verdict], *, dry_run: bool) -> Json:
    collected = [each for each in (*done.verdicts, *caches) if each.is_collected]
    return {
        "dry_run": dry_run,
        "bytes": sum(verdict.size for verdict in collected),
        "checkpoints": [_verdict_json(verdict) for verdict in done.verdicts],
        "caches": [_verdict_json(verdict) for verdict in caches],
        "staging": [*done.swept],
        "staging_stayed": [each._asdict() for each in done.stayed],
        "trash": [*done.trash],
    }


def _verdict_json(verdict: Verdict) -> Json:
    return {
        "name": verdict.name,
        "bytes": verdict.size,
        "collected": verdict.is_collected,
        "reason": verdict.reason,
        "text": verdict.text,
    }


def _lines(done: Collection, caches: Sequence[Verdict], *, dry_run: bool) -> list[str]:
    gone = "would go" if dry_run else "gone"
    lines = [
        f"{gone if v.is_collected else 'kept'}  {what}{v.name}  {human_bytes(v.size)}  "
        f"{v.reason}: {v.text}"
        for what, verdicts in (("", done.verdicts), ("caches/", caches))
        for v in verdicts
    ]
    lines += [f"{gone}  {name}  staging that nobody builds in any more" for name in done.swept]
    lines += [f"kept  {each.name}  {each.reason}: {each.text}" for each in done.stayed]
    left = "would go" if dry_run else "busy; the next gc tries again"
    return lines + [f"trash  {name}  {left}" for name in done.trash]


@click.command()
@click.argument("name")
@for_stores
@click.pass_context
def pin(ctx: click.Context, /, name: str, output: str, in_shared: bool, **flags: Any) -> None:
    """Keep a checkpoint, whatever gc or a lack of space would say."""
    store = directory_of(settings_as_user(flags, ctx.obj["environ"]), shared=in_shared)
    find_by_name(store, name)
    pins.pin(store.root, name, store.dir_mode)
    emit(output, {"name": name, "pinned": True}, f"{name}: pinned in {store.where}")


@click.command()
@click.argument("name")
@for_stores
@click.pass_context
def unpin(ctx: click.Context, /, name: str, output: str, in_shared: bool, **flags: Any) -> None:
    """Take a pin back; the checkpoint need not be there any more."""
    store = directory_of(settings_as_user(flags, ctx.obj["environ"]), shared=in_shared)
    found = pins.unpin(store.root, name)
    text = "not pinned any more" if found else "was not pinned"
    emit(output, {"name": name, "pinned": False}, f"{name}: {text}")


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (gc, pin, unpin)
}
