"""What dead pushes have left in an object store: prefixes that no published name stands for.

Parts of files that were never finished are not seen here: a bucket's lifecycle rules take those.
"""

from __future__ import annotations

import time

from entrypoint.store.bucket import asking
from entrypoint.store.objects import ObjectStore
from entrypoint.store.published import NONCE
from entrypoint.store.upload import delete


def leftovers(store: ObjectStore, grace: float) -> list[str]:
    """Return the pushes that nothing names and that nothing was added to for `grace` seconds.

    Raises: StoreError; ManifestError for a published name that does not say where its files lie.
    """
    old = [files for files in _pushes(store) if _age(store, files) > grace]
    # Asked for last: what was published meanwhile is named by now.
    named = {store.find(name).published.files for name in store.names()} if old else set()
    return [files for files in old if files not in named]


def sweep(store: ObjectStore, grace: float) -> list[str]:
    """Delete what `leftovers` finds, and return it. Raises: as `leftovers`."""
    found = leftovers(store, grace)
    for files in found:
        delete(store, files)
    return found


def _pushes(store: ObjectStore) -> list[str]:
    return [
        files
        for name in _below(store, "")
        if not name.startswith(".")
        for files in _below(store, name)
        if NONCE.fullmatch(files.removeprefix(f"{name}/"))
    ]


def _below(store: ObjectStore, prefix: str) -> list[str]:
    with asking(store.where):
        return list(store.asks.list_with_delimiter(prefix)["common_prefixes"])


def _age(store: ObjectStore, files: str) -> float:
    newest = max((stored.changed.timestamp() for stored in store.list(files)), default=time.time())
    return time.time() - newest
