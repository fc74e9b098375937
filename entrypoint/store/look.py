"""Looking for a checkpoint that fits: one finding a store."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.checkpoint.entry import HAVE
from entrypoint.checkpoint.finding import (
    Absent,
    Complete,
    Damaged,
    Finding,
    Foreign,
    Rejected,
    Unreachable,
)
from entrypoint.checkpoint.inspect import Stamp, decode_named, examine, nobody_waits, ranks_in
from entrypoint.checkpoint.key import Difference, Key, differences
from entrypoint.checkpoint.layout import generation_of, name_words
from entrypoint.checkpoint.manifest import MANIFEST, SCHEMA, Manifest
from entrypoint.errors import ManifestError, NotFoundError, SchemaError, StoreError
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejection

if TYPE_CHECKING:
    from entrypoint.store.base import CheckpointStore


class Wanted(NamedTuple):
    """What is looked for.

    `is_same_model` compares a manifest's source with ours; it may read the source, so it is asked
    only about candidates that fit in everything else. `rejection` says why a manifest must not be
    served, or None. `name`: only this checkpoint. `likely`: the first digits of the full key's
    digest, by which its name ends; looked at first. `model`: how its name begins; looked at next.
    `ranks` are those that run here, None for all.
    """

    key: Key
    is_same_model: Callable[[Manifest], bool]
    rejection: Callable[[Manifest], Rejection | None]
    name: str | None = None
    likely: str | None = None
    model: str = ""
    ranks: Collection[int] | None = None


class Bounds(NamedTuple):
    """How much one look asks of a store that is far: manifests, and seconds of waiting for them."""

    manifests: int
    seconds: float


def look(
    store: "CheckpointStore", wanted: Wanted, memory: Memory, bounds: Bounds | None = None
) -> Finding:
    """Return the best that `store` has: complete, else rejected, damaged, or the nearest foreign.

    Within `bounds` only those are looked at whose names come nearest. Changes nothing in the store.
    """
    try:
        names = _in_order(store.names(), wanted)
    except (StoreError, OSError) as error:
        return Unreachable(str(error))
    if wanted.name is not None and not names:
        return Absent(f"no checkpoint named {wanted.name}")
    worst: Finding = Absent()
    waited = 0.0
    for name in names[: bounds.manifests if bounds else None]:
        began = time.monotonic()
        found = _find(store, name)
        waited += time.monotonic() - began
        finding = _judge(store, found, wanted, memory) if isinstance(found, Manifest) else found
        if isinstance(finding, Complete):
            return finding
        worst = _nearer(worst, finding)
        if bounds and waited > bounds.seconds and isinstance(worst, (Absent, Foreign)):
            return Unreachable(f"{store.where}: {waited:.0f} s were not enough to look through it")
    return worst


def _in_order(names: list[str], wanted: Wanted) -> list[str]:
    if wanted.name is not None:
        return [name for name in names if name == wanted.name]
    likely = [name for name in names if _is_likely(name, wanted)]
    likely.sort(key=lambda name: generation_of(name)[1], reverse=True)
    words = name_words(wanted.key)
    others = [name for name in names if name not in likely]
    others.sort(key=lambda name: (not name.startswith(wanted.model + words), words not in name))
    return likely + others


def _is_likely(name: str, wanted: Wanted) -> bool:
    return wanted.likely is not None and generation_of(name)[0].endswith("-" + wanted.likely)


def _find(store: "CheckpointStore", name: str) -> Manifest | Finding:
    try:
        return manifest_of(store, name)
    except SchemaError as error:
        return Foreign(name, (Difference("schema", SCHEMA, error.found),))
    except ManifestError as error:
        return Damaged(name, (str(error),))
    except NotFoundError:
        # Collected, or moved to the trash, since it was listed.
        return Absent()
    except StoreError as error:
        return Unreachable(str(error))


def _judge(store: "CheckpointStore", manifest: Manifest, wanted: Wanted, memory: Memory) -> Finding:
    differing = differences(wanted.key, manifest.key)
    if not differing and not wanted.is_same_model(manifest):
        differing = (
            Difference("model", wanted.key.model or "another identity", manifest.key.model),
        )
    if differing:
        return Foreign(manifest.name, differing)
    if (rejection := wanted.rejection(manifest)) is not None:
        return Rejected(manifest.name, rejection.kind, rejection.reason)
    ranks = manifest.layout.ranks if wanted.ranks is None else wanted.ranks
    return store.check(manifest, memory, ranks)


def manifest_of(store: "CheckpointStore", name: str) -> Manifest:
    """Read and check a manifest. Raises: ManifestError; SchemaError; NotFoundError; StoreError."""
    return decode_named(store.read_manifest(name), name, f"{store.locate(name)}/{MANIFEST}")


def check(
    directory: Path,
    manifest: Manifest,
    memory: Memory,
    ranks: Collection[int],
    alive: Callable[[], None] = nobody_waits,
) -> Complete | Absent | Damaged | Unreachable:
    """Compare the files on disk with the manifest; remember what needs no second reading.

    All that lies there is looked at, so that what is known of it never depends on who asks;
    without all of `ranks` among it, the checkpoint is absent for them. `alive` is called for each
    file.
    """
    known = memory.recall("inspections", _question(directory, manifest))
    known = known if isinstance(known, dict) and "stamps" in known else {}
    stamps = _stamps_from(cast("dict[str, Json]", known.get("stamps", {})))
    held = ranks_in(directory, manifest)
    if not held:
        return Damaged(manifest.name, (f"{HAVE}: names no rank",))
    try:
        found = examine(directory, manifest, held, stamps, alive)
    except OSError as error:
        return Unreachable(str(error))
    if found.discrepancies:
        return Damaged(manifest.name, found.discrepancies)
    wrong = tuple(cast("list[str]", known.get("wrong", [])))
    if found.stamps != stamps:
        wrong = _still_wrong(wrong, stamps, found.stamps)
        _remember(directory, manifest, found.stamps, wrong, memory)
    if wrong:
        return Damaged(manifest.name, wrong)
    if missing := set(ranks) - set(held):
        has, lacks = (manifest.layout.in_words(some) for some in (held, missing))
        return Absent(f"{manifest.name} holds {has}, and lacks {lacks}")
    return Complete.of(manifest, str(directory), held)


def _still_wrong(
    wrong: tuple[str, ...], before: Mapping[str, Stamp], now: Mapping[str, Stamp]
) -> tuple[str, ...]:
    """Return what is wrong with files that are what they were: a link of one moves its ctime."""
    same = [f"{path}:" for path, stamp in now.items() if before.get(path, ())[:3] == stamp[:3]]
    return tuple(text for text in wrong if text.startswith(tuple(same)))


def remember_look(
    directory: Path, manifest: Manifest, wrong: tuple[str, ...], memory: Memory
) -> None:
    """Keep what a deep look found, so that a quick one knows it as long as no file moved."""
    try:
        found = examine(directory, manifest, ranks_in(directory, manifest), {})
    except OSError:
        return
    _remember(directory, manifest, found.stamps, wrong, memory)


def _question(directory: Path, manifest: Manifest) -> str:
    # What one user could open another perhaps cannot.
    return digest_json(["inspection", os.geteuid(), str(directory), manifest.digest])


def _remember(
    directory: Path,
    manifest: Manifest,
    stamps: Mapping[str, Stamp],
    wrong: tuple[str, ...],
    memory: Memory,
) -> None:
    answer: dict[str, Json] = {
        "stamps": {path: cast("Json", list(stamp)) for path, stamp in stamps.items()},
        "wrong": list(wrong),
    }
    memory.remember("inspections", _question(directory, manifest), answer)


def _stamps_from(known: Mapping[str, Json]) -> dict[str, Stamp]:
    return {path: cast("Stamp", tuple(cast("list[int]", s))) for path, s in known.items()}


_NEARNESS = {Absent: 0, Unreachable: 1, Foreign: 2, Damaged: 4, Rejected: 5}
_OTHER_RANKS = 3


def _nearer(one: Finding, other: Finding) -> Finding:
    """Return what tells more; of two foreign ones, the first with the fewest differences."""
    if isinstance(one, Foreign) and isinstance(other, Foreign):
        return other if len(other.differences) < len(one.differences) else one
    return other if _nearness(other) > _nearness(one) else one


def _nearness(finding: Finding) -> int:
    if isinstance(finding, Absent) and finding.why:
        return _OTHER_RANKS
    return _NEARNESS.get(type(finding), 0)


def find_by_name(store: "CheckpointStore", name: str) -> Manifest:
    """Return the manifest of a checkpoint by name. Raises: NotFoundError, ManifestError."""
    try:
        return manifest_of(store, name)
    except NotFoundError:
        known = ", ".join(store.names()[:3]) or "nothing"
        msg = f"{store.where}: no checkpoint named {name!r}"
        raise NotFoundError(msg, hint=f"it has {known}") from None
