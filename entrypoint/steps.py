"""One step of a boot: copy or save a checkpoint, as the only process of this host.

When a step raises, nothing of it is published. What had to make way for it stays away: a damaged
checkpoint of the same name, and those evicted for room.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from entrypoint import compiled, publishing
from entrypoint.assess import Assessment, Boot, assess_again
from entrypoint.checkpoint.finding import Complete, Damaged, Finding, Rejected
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import (
    ManifestError,
    NotFoundError,
    ProofError,
    SaveError,
    SpaceError,
    StagingError,
    StoreError,
)
from entrypoint.obstacles import proof_needed
from entrypoint.plan import Action
from entrypoint.progress import Progress
from entrypoint.state.ledger import Ledger
from entrypoint.state.places import below
from entrypoint.state.tries import Tries
from entrypoint.store import lock
from entrypoint.store.look import manifest_of

if TYPE_CHECKING:
    from entrypoint.assembly import Subject

Made = TypeVar("Made")


def alone(
    boot: Boot,
    assessment: Assessment,
    action: Action,
    perform: Callable[[Boot, Assessment, Action], Made],
) -> Made | Manifest:
    """Perform one step as the only process of this host, unless another made it meanwhile.

    The lock saves work, and nothing breaks where it lies.
    """
    from entrypoint.store.sweep import sweep  # noqa: PLC0415 - a hit sweeps nothing

    try:
        boot.settings.local_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{boot.settings.local_dir}: cannot be made: {error.strerror}"
        raise StagingError(msg, hint="mount a directory there, or name another one") from None
    path = lock_file(boot.settings.local_dir, subject(assessment))

    def on_wait(text: str) -> None:
        boot.log.line("lock.wait", text)
        boot.status.phase("waiting", text)

    with lock.exclusive(path, boot.settings.save_timeout, on_wait):
        settings, part = boot.settings, _part(assessment, action)
        for left in sweep(settings.local_dir, settings.grace, settings.dir_mode, spare=part):
            boot.log.line("store.swept", f"{left}: nobody was building it any more")
        made = _made_meanwhile(boot, assessment)
        return perform(boot, assessment, action) if made is None else made


def subject(assessment: Assessment) -> str:
    """Return a short name for what is wanted: hex digits, by words and not by a model's bytes."""
    resolution = assessment.resolution
    assert resolution is not None
    return resolution.key.subject(resolution.model_word)


def lock_file(local_dir: Path, subject: str) -> Path:
    """Return what is locked by the only process of this host that makes a checkpoint of it."""
    return local_dir / f".{subject}.lock"


def _part(assessment: Assessment, action: Action) -> str:
    """Return whose staging a copy goes on with, if it is one."""
    if action.kind != "copy" or action.manifest is None:
        return ""
    return action.manifest.part(_lacking(assessment, action.manifest))


def _lacking(assessment: Assessment, manifest: Manifest) -> Collection[int]:
    """Return the ranks that run here and of which the local store has no files of `manifest`.

    All that run here where it has them all, and still was not found complete.
    """
    assert assessment.resolution is not None
    store, local = assessment.local_store, assessment.situation.local
    wanted = {*assessment.resolution.ranks}
    if isinstance(local, Damaged) and local.name == manifest.name:
        return wanted
    try:
        here = manifest_of(store, manifest.name)
    except (ManifestError, NotFoundError, StoreError):
        return wanted
    if here.digest != manifest.digest:
        # With another proof, say: to complete one, it must be the very same manifest.
        return wanted
    return wanted - {*store.ranks(here)} or wanted


def _made_meanwhile(boot: Boot, assessment: Assessment) -> Manifest | None:
    """Look again, now that nobody else is at it."""
    before, now = assessment.situation.local, assess_again(boot).situation.local
    if not isinstance(now, Complete) or _is_known_bad(before, now.manifest.name):
        return None
    boot.log.line("local.hit", f"another process has made {now.manifest.name} meanwhile")
    return now.manifest


def _is_known_bad(before: Finding, name: str) -> bool:
    """Tell whether this boot knows more of it than another look: every byte, or who died on it."""
    match before:
        case Rejected(kind="unproved"):
            # A proof may have come meanwhile.
            return False
        case Damaged() | Rejected():
            return before.name == name
        case _:
            return False


def copy_here(boot: Boot, assessment: Assessment, action: Action) -> Manifest:
    """Copy the checkpoint that `action` names from the shared store into the local one.

    Of the shards only those of ranks that run here and that the local store lacks; what it holds
    of the same checkpoint stays.
    """
    assert assessment.shared_store is not None
    assert assessment.resolution is not None
    assert action.manifest is not None
    local = assessment.situation.local
    if isinstance(local, Damaged) and local.name == action.manifest.name:
        # Its sizes may be right: staging would take it for the same bytes, and keep it.
        assessment.local_store.retire(local.name)
    lacking = _lacking(assessment, action.manifest)
    made = _copy_ranks(boot, assessment, action.manifest, lacking)
    wanted = assessment.resolution.ranks
    if not {*wanted} <= {*assessment.local_store.ranks(made)}:
        # Where files cannot be linked, what was there has gone.
        made = _copy_ranks(boot, assessment, action.manifest, wanted)
    here = assessment.local_store.path(made.name)
    compiled.fetch(boot, assessment.shared_store, here, action.manifest)
    return made


def _copy_ranks(
    boot: Boot, assessment: Assessment, manifest: Manifest, ranks: Collection[int]
) -> Manifest:
    store, source = assessment.local_store, assessment.shared_store
    assert source is not None
    with store.stage(manifest.name, manifest.part(ranks)) as staging:
        taken = staging.room_taken(manifest.files_for(ranks))
        make_room(boot, assessment, manifest.size_for(ranks), manifest.name, staging.path, taken)
        started = time.monotonic()
        made = publishing.transport(boot, source, staging, manifest, ranks, "copy", store.where)
    assert assessment.resolution is not None
    _note(boot, "copy.done", assessment.resolution, made, time.monotonic() - started)
    return made


def _note(
    boot: Boot, event: str, resolution: Resolution, manifest: Manifest, seconds: float
) -> None:
    """Leave how long a step took, for `advise`; where nothing can be written, nobody knows."""
    Ledger(boot.settings.state_dir).append(
        {
            "boot": boot.log.boot,
            "time": round(time.time(), 3),
            "event": event,
            **resolution.family,
            "checkpoint": manifest.name,
            "manifest": manifest.digest,
            "seconds": round(seconds, 3),
        }
    )


def make_room(
    boot: Boot,
    assessment: Assessment,
    needed: int,
    wanted: str | None = None,
    staged: Path | None = None,
    taken: int = 0,
) -> None:
    """Have room in the local store, evicting what was served least recently if it must be.

    Neither the checkpoint `wanted` goes, nor the staging that the room is for; it has `taken` bytes
    of the disk already, and none of what the store may hold.
    Raises: SpaceError, StoreError.
    """
    from entrypoint.store import collect, space  # noqa: PLC0415 - a hit needs neither

    settings, most = boot.settings, boot.settings.max_bytes
    collect.make_room(
        assessment.local_store,
        settings.state_dir,
        needed - taken,
        space.Limits(settings.reserve_bytes, most - taken if most is not None else None),
        wanted,
        lambda text: boot.log.line("space.evicted", text),
        staged,
    )


def save_here(boot: Boot, assessment: Assessment, _: Action) -> Manifest:
    """Save a checkpoint from the source into the local store; publish it if so told."""
    from entrypoint import saver  # noqa: PLC0415 - a hit saves nothing

    resolution, settings, log = assessment.resolution, boot.settings, boot.log
    assert resolution is not None
    expected = sum(file.size for file in assessment.source.here.weights)
    make_room(boot, assessment, expected)

    boot.status.phase("saving")
    started = time.monotonic()

    def say(text: str) -> None:
        log.line("prove", text)
        boot.status.phase("proving", text)

    progress = Progress(log, boot.status, "save", expected, first="vLLM is loading the model")
    order = saver.Order(
        settings=settings,
        engine=assessment.engine,
        words=boot.words,
        environ=boot.environ,
        resolution=resolution,
        subject=subject_of(assessment),
        memory=boot.memory,
        log_file=below(settings.state_dir, "logs") / f"save-{log.boot}.log",
        boot=log.boot,
        proof_needed=proof_needed(settings, resolution),
        say=say,
        on_progress=progress.at,
    )
    with progress, _counted(Tries(settings, order.subject.key_by_config)):
        manifest = saver.save(order, assessment.local_store)
        progress.at(manifest.size)
    log.line("save.done", f"{manifest.name}: {progress.summary}")
    _note(boot, "save.done", resolution, manifest, time.monotonic() - started)
    if settings.publish:
        publishing.offer(boot, assessment, manifest)
    return manifest


@contextlib.contextmanager
def _counted(tries: Tries) -> Iterator[None]:
    """Remember whether what is done within failed; who was told to stop has not."""
    try:
        yield
    except (ProofError, SaveError, SpaceError, StagingError) as error:
        tries.failed(error.reason, str(error), error.exit_code)
        raise
    tries.succeeded()


def subject_of(assessment: Assessment) -> Subject:
    """Return what a save would be of."""
    from entrypoint.assembly import Subject  # noqa: PLC0415 - a hit saves nothing

    resolution = assessment.resolution
    assert resolution is not None
    return Subject(
        key=resolution.key,
        word=resolution.model_word,
        revision=resolution.revision,
        plugin=resolution.plugin,
        source=assessment.source.here,
        identity=assessment.source.identity,
    )
