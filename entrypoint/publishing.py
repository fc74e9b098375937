"""Carrying a checkpoint from store to store: here, and to where many nodes share it.

Where it fails, nothing is published there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, cast

from entrypoint.assess import Assessment, Boot, answers
from entrypoint.checkpoint.digest import Json, digest_file
from entrypoint.checkpoint.manifest import Manifest, decode
from entrypoint.errors import (
    ConfigError,
    DamagedError,
    ManifestError,
    NotFoundError,
    ShardbootError,
    StoreError,
)
from entrypoint.log import human_bytes
from entrypoint.model.bounded import Alive, while_alive
from entrypoint.obstacles import proof_needed
from entrypoint.plan import decide
from entrypoint.progress import Progress
from entrypoint.state import process
from entrypoint.state.proofs import Proofs
from entrypoint.store.base import CheckpointStaging, CheckpointStore
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import remember_look

SPARE_SECONDS: Final = 60.0
"""For whoever copies, which bounds its own silence, to say so itself."""


def transport(
    boot: Boot,
    source: CheckpointStore,
    staging: CheckpointStaging,
    manifest: Manifest,
    ranks: Collection[int],
    verb: str,
    where: str,
    alive: Alive = lambda: None,
) -> Manifest:
    """Copy one checkpoint, for `ranks`, between stores; return it as published.

    Verified in the stream. `where` names the store of `staging`, which must have room. `alive` is
    called with every piece. When this raises, nothing is published there.
    """
    from entrypoint.store import transfer  # noqa: PLC0415 - a hit copies nothing

    entries, total = manifest.files_for(ranks), manifest.size_for(ranks)
    boot.status.phase("copying" if verb == "copy" else "publishing")
    if staging.held_bytes:
        text = f"{human_bytes(staging.held_bytes)} of {human_bytes(total)} are there already"
        boot.log.line(f"{verb}.resumed", f"{text}, from one that was interrupted; reading them")
    with Progress(boot.log, boot.status, verb, total, staging.held_bytes) as progress:

        def moved(size: int) -> None:
            progress.add(size)
            alive()

        transfer.copy(source, manifest.name, manifest, entries, staging, moved)
        result = staging.commit(manifest, ranks)
    some = "" if len(ranks) == manifest.layout.world else f" for {manifest.layout.in_words(ranks)}"
    text = f"{result.name} {result.outcome} in {where}{some}"
    boot.log.line(f"{verb}.done", f"{text}: {progress.summary}")
    return manifest.renamed(result.name)


def push(
    boot: Boot, assessment: Assessment, manifest: Manifest, alive: Alive = lambda: None
) -> Manifest:
    """Copy a local checkpoint to the shared store. `alive` as for `transport`.

    Raises: ConfigError without one; as `publish`.
    """
    if assessment.shared_store is None:
        msg = "there is no shared store"
        raise ConfigError(msg, hint="set --shared")
    return publish(boot, assessment.local_store, assessment.shared_store, manifest, alive)


def offer(boot: Boot, assessment: Assessment, manifest: Manifest) -> None:
    """Push a fresh save; a failure is said and costs nothing else.

    A shared directory that falls silent is left, with whoever waits for it.
    """
    from entrypoint.store.transfer import STALL_SECONDS  # noqa: PLC0415 - a hit copies nothing

    def told(alive: Alive = lambda: None) -> list[str]:
        try:
            push(boot, assessment, manifest, alive)
        except ShardbootError as error:
            return [f"{error}", error.hint or ""]
        return []

    def in_child(alive: Alive) -> Json:
        process.die_with_parent()
        return [*told(alive)]

    where, silence = assessment.shared_store, STALL_SECONDS + SPARE_SECONDS
    boot.status.phase("publishing")
    failed: Json = []
    try:
        # The client of object stores has its own bounds.
        is_distant = isinstance(where, DirectoryStore)
        failed = while_alive(silence, in_child) if is_distant else [*told()]
    except OSError as error:
        failed = [f"{error}", ""]
    if failed is None:
        assert where is not None
        failed = [f"{where.where} has been silent for {silence:.0f} s", ""]
    if failed:
        text, hint = cast("list[str]", failed)
        boot.log.line("publish.failed", text, hint=hint)


def publish(
    boot: Boot,
    source: DirectoryStore,
    target: CheckpointStore,
    manifest: Manifest,
    alive: Alive = lambda: None,
) -> Manifest:
    """Copy a checkpoint to a store of many nodes, where theirs are never evicted.

    A proof that was made here goes along, in the manifest that is published; the one here stays as
    it is. A checkpoint that is found damaged on the way is known to be so from then on.
    Raises: NotFoundError where only some ranks are here, or as `_sealed`; StoreError; SpaceError;
    StagingError; DamagedError.
    """
    from entrypoint.store import space  # noqa: PLC0415 - a hit pushes nothing

    ranks = manifest.layout.ranks
    if set(ranks) - set(held := source.ranks(manifest)):
        said = manifest.layout.in_words(held)
        msg = f"{manifest.name}: the local store has {said} only, and a push takes all"
        raise NotFoundError(msg, hint="push it from the machine that saved it")
    if not answers(target):
        raise StoreError(f"{target.where} does not answer")
    if isinstance(target, DirectoryStore) and not _takes_names(target.root):
        raise StoreError(f"{target.where}: uid {os.geteuid()} may not write there")
    there = _sealed(boot, manifest)
    if there is not manifest:
        boot.log.line("push.proof", f"{manifest.name}: goes with the proof that was made here")
    with target.stage(manifest.name, manifest.content) as staging:
        if isinstance(target, DirectoryStore):
            needed = manifest.size - staging.room_taken(manifest.files)
            space.require_room(target.root, needed, space.Limits(boot.settings.reserve_bytes))
        try:
            return transport(boot, source, staging, there, ranks, "push", target.where, alive)
        except DamagedError as error:
            _know_damage(boot, source.path(manifest.name), manifest, error.file)
            raise


def _know_damage(boot: Boot, directory: Path, manifest: Manifest, file: str) -> None:
    """Look at a file again, and remember what is wrong: read wrong once, it may be right.

    At that one alone: others wait for whoever publishes, and a scrub finds whatever else there is.
    """
    try:
        wrong = tuple(
            f"{entry.path}: BLAKE3 is not the one in the manifest"
            for entry in manifest.files
            if entry.path == file and digest_file(directory / file) != entry.blake3
        )
    except OSError:
        return
    if wrong:
        remember_look(directory, manifest, wrong, boot.memory)


def _takes_names(root: Path) -> bool:
    """Tell whether what was copied could get its name; one that is not there yet will be made."""
    return not os.path.isdir(root) or os.access(root, os.W_OK | os.X_OK)


def _sealed(boot: Boot, manifest: Manifest) -> Manifest:
    """Return the same checkpoint with the proof that this node keeps of it, for others to see.

    Where it keeps none, that is the manifest as it is.
    Raises: NotFoundError where what is kept is no proof of it, or too large for a manifest.
    """
    if manifest.proof:
        return manifest
    try:
        proof = Proofs(boot.settings.state_dir).read(manifest)
        return manifest if proof is None else decode(manifest._replace(proof=proof).encode())
    except ManifestError as error:
        msg = f"{manifest.name}: what is kept as its proof cannot go along: {error}"
        raise NotFoundError(msg, hint="`shardboot prove` makes another") from None


def wanted_checkpoint(boot: Boot, assessment: Assessment) -> Manifest:
    """Return the local checkpoint that fits, and may be pushed.

    Raises: NotFoundError saying what there is, or that no proof would go with it.
    """
    action = decide(assessment.situation, boot.policy)
    if action.kind == "reuse" and action.manifest is not None:
        assert assessment.resolution is not None
        needed = proof_needed(boot.settings, assessment.resolution)
        if needed and not _sealed(boot, action.manifest).proof:
            msg = f"{action.manifest.name} must be proved ({needed}), and was not yet"
            hint = "no other node would serve it; a boot proves it, or `shardboot prove`"
            raise NotFoundError(msg, hint=hint)
        return action.manifest
    msg = f"no local checkpoint fits: {action.text}"
    raise NotFoundError(msg, hint="`shardboot save` makes one")
