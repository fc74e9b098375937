"""Beginning a tee: vLLM serves the source, and its workers save a checkpoint on the way.

Boot makes the staging and leaves there what is to be saved; exec keeps its lock. Each rank writes
its files, and the last one has `entrypoint.finisher` commit them. Whatever fails takes the staging
away, and the server goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrypoint import steps
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.layout import layout_of
from entrypoint.obstacles import proof_needed
from entrypoint.plan import Action, Obstacle
from entrypoint.store import order as orders
from entrypoint.store import sweep, trash


def begin(boot: Boot, assessment: Assessment, _: Action) -> Path | Obstacle:
    """Return new staging for a tee, with its order; its lock is this process's, exec or not.

    Where another server is at it already, there is no need for a second one.
    Raises: StagingError, StoreError, SpaceError.
    """
    store, settings = assessment.local_store, boot.settings
    about = steps.subject(assessment)
    living, left = sweep.teed(store.root, about)
    if living:
        text = f"another server is saving it already, in {living[0]}"
        return Obstacle("tee.busy", text, is_wish=True)
    sweep.discard(store.root, left, settings.dir_mode)
    trash.empty(store.root)
    steps.make_room(boot, assessment, sum(f.size for f in assessment.source.here.weights))
    subject = steps.subject_of(assessment)
    order = {**_order(boot, assessment, about), "key_by_config": subject.key_by_config}
    with store.stage(subject.name) as staging:
        orders.leave(staging, {**order, "of": subject.to_json()})
        staging.hand_over()
    return staging.path


def _order(boot: Boot, assessment: Assessment, about: str) -> Mapping[str, Json]:
    """Return all that those who go on need to know; there is no secret in it."""
    assert assessment.resolution is not None
    settings = boot.settings
    return {
        "subject": about,
        "state": str(settings.state_dir),
        "save_timeout": settings.save_timeout,
        "world": layout_of(assessment.resolution.key).world,
        "size_per_file": settings.size_per_file,
        "dir_mode": settings.dir_mode,
        "file_mode": settings.file_mode,
        "record": bool(proof_needed(settings, assessment.resolution)),
    }


def loader(boot: Boot, assessment: Assessment, staging: str) -> dict[str, Json]:
    """Return what our load format is told."""
    assert assessment.resolution is not None
    return {
        "staging": staging,
        "source_format": assessment.resolution.load_format,
        "boot": boot.log.boot,
        "state": str(boot.settings.state_dir),
    }
