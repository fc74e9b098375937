"""What has lost its checkpoint on the shelf of a shared store, or was left there, and goes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from entrypoint.caches.label import MAX_LABEL_BYTES, decode
from entrypoint.caches.place import checkpoint_of
from entrypoint.caches.shelf import Shelf, Stored
from entrypoint.errors import ManifestError, NotFoundError
from entrypoint.store.retention import Verdict

LABEL = ".json"


def collect_shared(
    shelf: Shelf, published: Collection[str], grace: float, now: float, *, dry_run: bool
) -> list[Verdict]:
    """Remove what is older than `grace` seconds and is of no checkpoint that is `published`.

    And archives that no label names, as a push that was killed leaves them. Return what went.
    Raises: StoreError.
    """
    found = shelf.names()
    old = {name for name, stored in found.items() if now - stored.changed > grace}
    # Labels are read last: what was put meanwhile is young.
    gone = [each for each in _orphans(shelf, found, published) if each.name in old]
    if not dry_run:
        for verdict in gone:
            shelf.remove(verdict.name)
    return gone


def _orphans(
    shelf: Shelf, found: dict[str, Stored], published: Collection[str]
) -> Iterator[Verdict]:
    named: set[str] = set()
    for name in sorted(found):
        if not name.endswith(LABEL):
            continue
        checkpoint = checkpoint_of(name.removesuffix(LABEL))
        if checkpoint in published:
            named |= {name, _archive_of(shelf, name)}
    for name in sorted(found.keys() - named, key=lambda name: not name.endswith(LABEL)):
        yield Verdict(name, found[name].size, True, "orphan", "no published checkpoint has it")


def _archive_of(shelf: Shelf, name: str) -> str:
    try:
        return decode(shelf.read(name, MAX_LABEL_BYTES)).archive
    except (ManifestError, NotFoundError):
        return ""
