"""What vLLM has compiled and tuned for the checkpoint of a boot: mended if it must be, and given.

Not where the user has set VLLM_CACHE_ROOT, nor where the source is served: that boot is what it
would be without shardboot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from entrypoint.assess import Boot
from entrypoint.caches import place
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import NotFoundError, ShardbootError
from entrypoint.model.bounded import Alive, while_alive
from entrypoint.plan import Action
from entrypoint.state import process
from entrypoint.state.attempts import CACHES_RENEWED, Entry, distrust, has_served
from entrypoint.state.ledger import Ledger
from entrypoint.store.base import CheckpointStore
from entrypoint.store.directory import DirectoryStore


def place_for(boot: Boot, checkpoint: str) -> Path | None:
    """Return where the caches of the checkpoint at a path lie; None where that is not ours."""
    if not place.is_asked_for(boot.environ, boot.settings.state_dir):
        return None
    return place.place_of(boot.settings.state_dir, os.path.basename(checkpoint))


def give(boot: Boot, action: Action, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment in which vLLM keeps its caches for this checkpoint."""
    where = place_for(boot, str(action.path))
    if where is None:
        return environ
    return place.give(environ, boot.settings.state_dir, where, str(action.path))


def mend(boot: Boot, action: Action, entries: Sequence[Entry]) -> None:
    """Take bad caches out of the way: they are no fault of the checkpoint, and stop no boot.

    All go, once, where the boot before died after loading and before it served. What is empty or
    cannot be read goes where the host was started anew since, as after a power loss. Else nothing
    is looked at. `entries` are the ledger's.
    """
    assert action.manifest is not None
    digest = action.manifest.digest
    doubt = distrust(entries, digest, process.host_boot(), process.is_alive)
    where = place_for(boot, str(action.path)) if doubt else None
    if where is None or not os.path.isdir(where):
        return
    from entrypoint.caches import heal  # noqa: PLC0415 - most boots have nothing to mend

    if doubt == "some":
        if count := heal.heal(where):
            _say(boot, action, f"{count} empty or unreadable entries are gone")
    elif heal.renew(where):
        Ledger(boot.settings.state_dir).append(
            {"boot": boot.log.boot, "event": CACHES_RENEWED, "manifest": digest}
        )
        _say(boot, action, "gone: the boot before died after loading, and before it served")


def _say(boot: Boot, action: Action, text: str) -> None:
    assert action.manifest is not None
    boot.log.line("caches.mended", f"{action.manifest.name}: vLLM's caches: {text}")


def publish(boot: Boot, store: CheckpointStore, local: Path, manifest: Manifest, name: str) -> None:
    """Put the caches of `manifest`, which lies at `local`, beside it in a store, as `name` there.

    Only those that a boot has served with. Raises: NotFoundError where there are none;
    SpaceError; StoreError; StagingError.
    """
    from entrypoint.caches import exchange, shelf  # noqa: PLC0415 - a boot publishes none

    settings = boot.settings
    where = place_for(boot, str(local))
    if where is None or not has_served(Ledger(settings.state_dir).entries(), manifest.digest):
        msg = f"{manifest.name}: there are no caches that a boot has served with"
        raise NotFoundError(msg, hint="boot it once, until vLLM serves, and push again")
    wanted = exchange.Wanted(name, manifest.key.digest, str(local))
    done = exchange.publish(where, wanted, shelf.shelf_of(store), settings.cache_bytes)
    boot.log.line("caches.published", f"{name}: vLLM's caches: {done}")


def fetch(boot: Boot, store: CheckpointStore, local: Path, manifest: Manifest) -> None:
    """Fetch what the shared store has beside `manifest`, which was copied to `local`, if trusted.

    Not where caches are already. What goes wrong is said, and costs nothing else; a file system
    that falls silent is not waited for.
    """
    settings = boot.settings
    where = place_for(boot, str(local)) if settings.trust_caches else None
    if where is None or os.path.lexists(where):
        return
    from entrypoint.store.transfer import SILENCE_SECONDS  # noqa: PLC0415 - a hit fetches none

    def in_words(alive: Alive) -> Json:
        return _fetch(boot, store, local, manifest, where, alive)

    # The client of object stores has its own bounds.
    is_distant = isinstance(store, DirectoryStore)
    try:
        told = while_alive(SILENCE_SECONDS, in_words) if is_distant else in_words(lambda: None)
    except OSError as error:
        told = ["caches.unfetched", str(error)]
    late = ["caches.unfetched", f"{store.where} did not answer within {SILENCE_SECONDS:.0f} s"]
    event, text = cast("list[str]", told or late)
    if event:
        boot.log.line(event, f"{manifest.name}: vLLM's caches: {text}")


def _fetch(
    boot: Boot, store: CheckpointStore, local: Path, manifest: Manifest, where: Path, alive: Alive
) -> Json:
    """Fetch; return what to say of it, "" for nothing where there are none."""
    from entrypoint.caches import exchange, shelf  # noqa: PLC0415 - a hit fetches none

    wanted = exchange.Wanted(manifest.name, manifest.key.digest, str(local))
    most, reserve = boot.settings.cache_bytes, boot.settings.reserve_bytes
    try:
        done = exchange.fetch(where, wanted, shelf.shelf_of(store), most, reserve, alive)
    except NotFoundError:
        return ["", ""]
    except ShardbootError as error:
        return ["caches.unfetched", str(error)]
    return ["caches.fetched", done]
