"""What the sidecar sees: every checkpoint of a store, in plain values that others decide on."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import datetime as dt
import os
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from entrypoint.assess import unwaited
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Unreachable
from entrypoint.checkpoint.inspect import Stamp
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ManifestError, NotFoundError, StoreError
from entrypoint.state.attempts import UNUSED, Use
from entrypoint.state.awaited import Awaited
from entrypoint.state.memory import Memory
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections
from entrypoint.store import pins
from entrypoint.store.base import CheckpointStore
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.distant import DistantStore
from entrypoint.store.look import manifest_of
from entrypoint.store.retention import family_of
from entrypoint.store.survey import who_uses

COMPLETE: Final = "complete"
DAMAGED: Final = "damaged"
REJECTED: Final = "rejected"
UNREADABLE: Final = "unreadable"
STATES: Final = (COMPLETE, DAMAGED, REJECTED, UNREADABLE)


class Seen(NamedTuple):
    """One checkpoint of a store. Of an unreadable one only the name is known, and `text`, why.

    `content`, `digest`, `key` and `family` are digests; `made_for` is the key itself, and `source`
    the model's word; `created` is when it was saved, in seconds since 1970, and `host` where;
    `made_by` are vLLM's version and our format. `ranks` of `world`
    are those that lie there. `served` and `loaded` are what boots of this node did with it;
    `proved` is whether there is a proof, and `sealed` whether it lies in the manifest, where other
    nodes see it as well. `running` is whether somebody uses it, or may: its lock is not to be had.
    """

    name: str
    state: str
    text: str = ""
    content: str = ""
    digest: str = ""
    key: str = ""
    family: str = ""
    made_by: tuple[str, int] = ("", 0)
    created: float = 0.0
    created_at: str = ""
    host: str = ""
    bytes: int = 0
    files: int = 0
    ranks: tuple[int, ...] = ()
    world: int = 0
    proved: bool = False
    sealed: bool = False
    served: bool = False
    loaded: bool = False
    pinned: bool = False
    running: bool = False
    made_for: Key | None = None
    source: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return it as `shardboot list` does, and its state."""
        row: dict[str, Json] = {"name": self.name, "state": self.state}
        if self.text:
            row["error"] = self.text
        if self.state == UNREADABLE:
            return row
        return row | {
            "pinned": self.pinned,
            "running": self.running,
            "bytes": self.bytes,
            "files": self.files,
            "ranks": [*self.ranks],
            "created_at": self.created_at,
            "manifest": self.digest,
        }


class StoreView(NamedTuple):
    """What a look at a store gave: its checkpoints, newest first, or why there was none."""

    where: str
    seen: tuple[Seen, ...] = ()
    error: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return it for `/status`."""
        rows: list[Json] = [each.to_json() for each in self.seen]
        return {"where": self.where, "error": self.error or None, "checkpoints": rows}


class Manifests:
    """The manifests of one store; each is read once, for as long as its file stays the same.

    One that `is_far` is looked at as boots look at a shared store: its file system may hang.
    """

    def __init__(self, store: CheckpointStore, *, is_far: bool = False) -> None:
        self._store, self._is_far = store, is_far
        self._known: dict[str, tuple[Stamp | None, Manifest]] = {}
        self._facts: dict[str, Seen] = {}

    def all(self) -> Iterator[tuple[str, Manifest | str]]:
        """Yield each name, newest first, with its manifest, or with why it cannot be read.

        Raises: StoreError.
        """
        before, self._known = self._known, {}
        self._facts = {name: facts for name, facts in self._facts.items() if name in before}
        store = unwaited(self._store) if self._is_far else self._store
        names = store.names()
        # In a bucket a name never changes.
        stamps: list[Stamp | None] = [None] * len(names)
        if isinstance(store, DirectoryStore):
            stamps = store.stamps(names)
        for name, stamp in zip(names, stamps, strict=True):
            known = before.get(name)
            try:
                read = known[1] if known and known[0] == stamp else manifest_of(store, name)
            except NotFoundError:
                # Collected since it was listed.
                continue
            except (ManifestError, StoreError) as error:
                if isinstance(store, DistantStore) and store.is_silent:
                    raise
                yield name, str(error)
                continue
            self._known[name] = stamp, read
            yield name, read

    def facts(self, manifest: Manifest) -> Seen:
        """Return what a manifest alone tells. Worked out once: a look at many is to cost little."""
        found = self._facts.get(manifest.name)
        if found is None or found.digest != manifest.digest:
            found = self._facts[manifest.name] = _facts(manifest)
        return found


def see_local(
    store: DirectoryStore, manifests: Manifests, memory: Memory, uses: Mapping[str, Use]
) -> StoreView:
    """Look at the local store, as boots do, and at who uses what. Raises: StoreError."""
    if not os.path.isdir(store.root):
        # No boot has made it yet.
        return StoreView(store.where)
    pinned = pins.pinned(store.root)
    found = []
    for name, manifest in manifests.all():
        if isinstance(manifest, str):
            found.append(Seen(name, UNREADABLE, manifest))
            continue
        use = uses.get(manifest.digest, UNUSED)
        ranks = tuple(sorted(store.ranks(manifest)))
        state, text = _rejected(manifest, memory, use) or _checked(store, manifest, memory)
        seen = _seen(manifests.facts(manifest), manifest, ranks, memory)
        # A boot from one that waits for its proof may have served the source instead.
        awaited = Awaited(memory.root)
        waits = not seen.proved and awaited.waits(manifest.content, manifest.layout.ranks)
        found.append(
            seen._replace(
                state=state,
                text=text,
                served=use.served > 0 and not waits,
                loaded=use.loaded and not waits,
                pinned=name in pinned,
                running=any(who_uses(store.path(name), use)),
            )
        )
    return StoreView(store.where, tuple(found))


def see_shared(store: CheckpointStore, manifests: Manifests, memory: Memory) -> StoreView:
    """Look at the shared store: a copy from there is verified anyway. Raises: StoreError."""
    found = []
    for name, manifest in manifests.all():
        if isinstance(manifest, str):
            found.append(Seen(name, UNREADABLE, manifest))
            continue
        ranks = tuple(manifest.layout.ranks)
        seen = _seen(manifests.facts(manifest), manifest, ranks, memory)
        state, text = _rejected(manifest, memory) or (COMPLETE, "")
        found.append(seen._replace(state=state, text=text))
    return StoreView(store.where, tuple(found))


def _seen(facts: Seen, manifest: Manifest, ranks: tuple[int, ...], memory: Memory) -> Seen:
    return facts._replace(
        bytes=manifest.size_for(ranks),
        files=len(manifest.files_for(ranks)),
        ranks=ranks,
        proved=bool(manifest.proof or Proofs(memory.root).find(manifest)),
    )


def _facts(manifest: Manifest) -> Seen:
    return Seen(
        name=manifest.name,
        state=COMPLETE,
        content=manifest.content,
        digest=manifest.digest,
        key=manifest.key.digest,
        family=family_of(manifest),
        made_by=(manifest.key.vllm, manifest.key.format),
        created=_time(manifest.created_at),
        created_at=manifest.created_at,
        host=str(manifest.save.get("host", "")),
        world=manifest.layout.world,
        made_for=manifest.key,
        source=manifest.source.name,
        sealed=bool(manifest.proof),
    )


def _rejected(manifest: Manifest, memory: Memory, use: Use = UNUSED) -> tuple[str, str] | None:
    found = Rejections(memory.root).flaw(manifest.content, is_loaded=use.loaded)
    return None if found is None else (REJECTED, f"{found.kind}: {found.reason}")


def _checked(store: DirectoryStore, manifest: Manifest, memory: Memory) -> tuple[str, str]:
    match store.check(manifest, memory, ()):
        case Damaged(discrepancies=wrong):
            return DAMAGED, wrong[0]
        case Unreachable(error=error):
            return UNREADABLE, error
        case Complete() | Absent():
            return COMPLETE, ""


def _time(created_at: str) -> float:
    """Return seconds since 1970; 0 for a time that nobody can read: it is foreign data."""
    try:
        return dt.datetime.fromisoformat(created_at).timestamp()
    except (ValueError, OverflowError):
        return 0.0
