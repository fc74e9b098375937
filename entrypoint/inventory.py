"""Commands that look after a store: what is there, is it whole, and may it be served."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

import click

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Complete, Damaged, Unreachable
from entrypoint.checkpoint.inspect import verify_deep
from entrypoint.config import Settings
from entrypoint.errors import (
    ConfigError,
    DamagedError,
    ManifestError,
    NotFoundError,
    OwnershipError,
    StoreError,
)
from entrypoint.log import human_bytes
from entrypoint.options import emit, with_format, with_settings
from entrypoint.start import settings_as_user
from entrypoint.state.attempts import UNUSED
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections
from entrypoint.store import pins
from entrypoint.store.base import CheckpointStore, open_store
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import find_by_name, remember_look
from entrypoint.store.survey import uses_here, who_uses

if TYPE_CHECKING:
    from entrypoint.checkpoint.manifest import Manifest
    from entrypoint.store.objects import ObjectStore


def store_of(settings: Settings, *, shared: bool) -> DirectoryStore | ObjectStore:
    """Return the store that a command looks after. Raises: ConfigError."""
    modes = {"dir_mode": settings.dir_mode, "file_mode": settings.file_mode}
    if not shared:
        return DirectoryStore(settings.local_dir, **modes, begins_absent=True)
    if settings.shared is None:
        msg = "there is no shared store"
        raise ConfigError(msg, hint="name it with SHARDBOOT_SHARED")
    return open_store(settings.shared, **modes)


def directory_of(settings: Settings, *, shared: bool) -> DirectoryStore:
    """Return the store, where it must be a directory. Raises: ConfigError."""
    store = store_of(settings, shared=shared)
    if not isinstance(store, DirectoryStore):
        msg = f"{store.where}: nothing is pinned in object stores"
        raise ConfigError(msg, hint="`shardboot gc` takes no published checkpoint there anyway")
    return store


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
    """List checkpoints, newest first; say which are pinned, in use, or rejected."""
    settings = settings_as_user(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    uses, rejections = uses_here(settings.state_dir), Rejections(settings.state_dir)
    # An object store has neither pins nor locks.
    directory = store if isinstance(store, DirectoryStore) else None
    pinned = pins.pinned(directory.root) if directory else frozenset()
    rows: list[Json] = []
    lines: list[str] = []
    for name in store.names():
        try:
            manifest = find_by_name(store, name)
        except (ManifestError, NotFoundError, StoreError) as error:
            rows.append({"name": name, "error": str(error)})
            lines.append(f"{name}  unreadable: {error}")
            continue
        use = uses.get(manifest.digest, UNUSED)
        running = bool(directory and who_uses(directory.path(name), use)[0])
        flaw = rejections.flaw(manifest.content, is_loaded=use.loaded)
        held = store.ranks(manifest)
        rows.append(
            {
                "name": name,
                "pinned": name in pinned,
                "running": running,
                "rejected": f"{flaw.kind}: {flaw.reason}" if flaw else None,
                "bytes": manifest.size_for(held),
                "files": len(manifest.files_for(held)),
                "ranks": list[Json](sorted(held)),
                "created_at": manifest.created_at,
                "manifest": manifest.digest,
            }
        )
        marks = "  pinned" if name in pinned else ""
        marks += "  running" if running else ""
        marks += f"  rejected ({flaw.kind}: {flaw.reason})" if flaw else ""
        marks += _if_some(manifest, held, "  {}")
        size = human_bytes(manifest.size_for(held))
        lines.append(f"{name}  {size}  {manifest.created_at}{marks}")
    emit(output, rows, *(lines or [_nothing_in(store)]))


def _nothing_in(store: CheckpointStore) -> str:
    is_there = not isinstance(store, DirectoryStore) or store.root.exists()
    return f"{store.where}: {'' if is_there else 'not there yet, so '}no checkpoints"


@click.command()
@click.argument("name")
@for_stores
@click.pass_context
def show(ctx: click.Context, /, name: str, output: str, in_shared: bool, **flags: Any) -> None:
    """Show what a checkpoint is: key, source, layout, files."""
    store = store_of(settings_as_user(flags, ctx.obj["environ"]), shared=in_shared)
    manifest = find_by_name(store, name)
    held = store.ranks(manifest)
    document: Json = manifest.to_json() | {
        "blake3": manifest.digest,
        "path": store.locate(name),
        "ranks": list[Json](sorted(held)),
    }
    lines = [manifest.name, f"  source  {manifest.source.name}"]
    lines += [f"  {field:<20}{value}" for field, value in manifest.key.to_json().items() if value]
    here = manifest.files_for(held)
    lines += [f"  {human_bytes(entry.size):>10}  {entry.path}" for entry in here]
    if some := _if_some(manifest, held, "only {} here"):
        lines.append(f"  {some}")
    emit(output, document, *lines)


def _if_some(manifest: Manifest, held: Collection[int], text: str) -> str:
    """Return `text` with the ranks that lie in a store, where they are not all; else ""."""
    layout = manifest.layout
    return "" if len(held) == layout.world else text.format(layout.in_words(held))


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
    """Check one checkpoint, or all, against their manifests.

    Exit 21 if any is damaged; else 30 if any could not be looked at.
    """
    settings = settings_as_user(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    memory = Memory(settings.state_dir)
    rows: list[Json] = []
    lines: list[str] = []
    damaged: list[str] = []
    unseen: list[StoreError] = []
    for each in [name] if name else store.names():
        try:
            wrong, some = _verify_one(store, each, deep=deep, memory=memory)
        except StoreError as error:
            unseen.append(error)
            rows.append({"name": each, "error": str(error)})
            lines.append(f"{each}: not looked at: {error}")
            continue
        damaged += [each] if wrong else []
        rows.append({"name": each, "discrepancies": list(wrong)})
        lines.append(f"{each}: {wrong[0] if wrong else 'complete'}{some}")
    emit(output, rows, *(lines or [_nothing_in(store)]))
    if damaged:
        msg = f"{store.where}: damaged: {', '.join(damaged)}"
        raise DamagedError(msg, hint="boot copies or saves it again under the next generation")
    if unseen:
        raise unseen[0]


def _verify_one(
    store: CheckpointStore, name: str, *, deep: bool, memory: Memory
) -> tuple[tuple[str, ...], str]:
    """Return what is wrong with a checkpoint, and for which ranks if some of them are not there.

    Raises: StoreError, NotFoundError.
    """
    try:
        manifest = find_by_name(store, name)
    except ManifestError as error:
        return (str(error),), ""
    held = store.ranks(manifest)
    wrong = _discrepancies(store, manifest, held, deep=deep, memory=memory)
    return wrong, _if_some(manifest, held, ", for {}")


def _discrepancies(
    store: CheckpointStore,
    manifest: Manifest,
    held: Collection[int],
    *,
    deep: bool,
    memory: Memory,
) -> tuple[str, ...]:
    if deep and isinstance(store, DirectoryStore):
        directory = store.path(manifest.name)
        try:
            wrong = verify_deep(directory, manifest, held)
        except OSError as error:
            raise StoreError(str(error)) from error
        remember_look(directory, manifest, wrong, memory)
        return wrong
    finding = store.check(manifest, memory, held)
    if deep and isinstance(finding, Complete):
        from entrypoint.store import transfer  # noqa: PLC0415 - most looks are quick ones

        return transfer.verify(store, manifest)
    match finding:
        case Damaged(discrepancies=wrong):
            return wrong
        case Unreachable(error=text):
            raise StoreError(text)
        case _:
            return ()


@click.command()
@click.argument("name")
@click.option("--reason", default="an operator said so", help="why, for whoever asks later")
@for_stores
@click.pass_context
def reject(
    ctx: click.Context, /, name: str, reason: str, output: str, in_shared: bool, **flags: Any
) -> None:
    """Never serve this checkpoint again, from any store, until `unreject`."""
    settings = settings_as_user(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    manifest = find_by_name(store, name)
    if not Rejections(settings.state_dir).add(manifest.content, "operator", reason):
        raise _unwritable(settings, "the rejection cannot be kept there")
    emit(output, {"name": name, "rejected": True}, f"{name}: rejected: {reason}")


@click.command()
@click.argument("name")
@for_stores
@click.pass_context
def unreject(ctx: click.Context, /, name: str, output: str, in_shared: bool, **flags: Any) -> None:
    """Give a rejected checkpoint, and saves of its key, another chance."""
    settings = settings_as_user(flags, ctx.obj["environ"])
    store = store_of(settings, shared=in_shared)
    manifest = find_by_name(store, name)
    # Boots that failed before must not count again.
    entry: dict[str, Json] = {"event": "unrejected", "manifest": manifest.digest}
    if not Ledger(settings.state_dir).append(entry):
        raise _unwritable(settings, "that it may be served again cannot be kept there")
    rejections = Rejections(settings.state_dir)
    try:
        found = [rejections.remove(digest) for digest in (manifest.content, manifest.key.digest)]
    except OSError as error:
        raise _unwritable(settings, f"the rejection stays: {error.strerror}") from None
    text = "may be served again" if any(found) else "was not rejected"
    emit(output, {"name": name, "rejected": False}, f"{name}: {text}")


def _unwritable(settings: Settings, what: str) -> OwnershipError:
    msg = f"{settings.state_dir}: {what}"
    return OwnershipError(msg, hint="run as the service user, or name another --state-dir")


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (list_, show, verify, reject, unreject)
}
