"""Proving a checkpoint that lies in the local store already: the step that a save takes itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.finding import Complete, Rejected
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import NotFoundError, OwnershipError, ProofError, RefusedError
from entrypoint.obstacles import one_of_many
from entrypoint.plan import in_words
from entrypoint.state.places import below
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections
from entrypoint.store.look import find_by_name


def prove_here(
    boot: Boot, assessment: Assessment, on_tick: Callable[[], None] = lambda: None
) -> Manifest:
    """Prove the local checkpoint that fits, and remember it by its manifest.

    `on_tick` is called while vLLM loads it; what it raises ends that, and nothing is remembered.
    Raises: ProofError, after the checkpoint has been rejected; NotFoundError; OwnershipError;
    RefusedError on one of many nodes.
    """
    from entrypoint import prover  # noqa: PLC0415 - a hit does not need it

    resolution, settings = assessment.resolution, boot.settings
    if resolution is not None and resolution.nnodes > 1:
        why = one_of_many(resolution)
        raise RefusedError(why.text, reason=why.reason, code=why.exit_code)
    local = assessment.situation.local
    if resolution is None or not isinstance(local, (Complete, Rejected)):
        msg = f"there is no local checkpoint to prove: {in_words('local', local)}"
        raise NotFoundError(msg, hint="`shardboot save` makes one, and proves it")
    name = local.manifest.name if isinstance(local, Complete) else local.name
    store = assessment.local_store
    manifest = find_by_name(store, name)
    if set(manifest.layout.ranks) - set(held := store.ranks(manifest)):
        msg = f"{name}: the local store has {manifest.layout.in_words(held)} only"
        raise NotFoundError(msg, hint="a proof loads all: `shardboot pull` them first")
    with store.stage(name) as work:
        bench = prover.Bench(
            engine=assessment.engine,
            words=boot.words,
            environ=boot.environ,
            resolution=resolution,
            work=work.path,
            logs=below(settings.state_dir, "logs"),
            deadline=time.monotonic() + settings.save_timeout,
            say=lambda text: boot.log.line("prove", text),
            on_tick=on_tick,
        )
        try:
            proof = prover.prove(bench, store.path(name), manifest, None)
        except ProofError as error:
            if error.reason == ProofError.reason:
                Rejections(settings.state_dir).add(manifest.content, "unproven", str(error))
            raise
    rejections = Rejections(settings.state_dir)
    earlier = rejections.find(manifest.content)
    try:
        Proofs(settings.state_dir).add(manifest, proof)
        if earlier is not None and earlier.kind == "unproven":
            rejections.remove(manifest.content)
    except OSError as error:
        msg = f"{settings.state_dir}: the proof cannot be kept there: {error.strerror}"
        hint = "run as the service user, or name another --state-dir"
        raise OwnershipError(msg, hint=hint) from None
    return manifest
