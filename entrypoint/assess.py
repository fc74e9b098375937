"""Finding out all that a decision hangs on: vLLM's reading of the words, the source, the stores."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint import stand_in
from entrypoint.checkpoint.finding import Absent, Complete, Finding, Rejected
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import model_in_name
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import Settings
from entrypoint.engine.executable import Executable, find
from entrypoint.engine.resolution import Resolution, WordsRefused, untried
from entrypoint.engine.resolve import resolve
from entrypoint.launch import Seat
from entrypoint.log import Log
from entrypoint.model.bounded import within
from entrypoint.model.source import SourceView, StandIn
from entrypoint.obstacles import unproved, unsavable, unservable, unteeable, unwritable
from entrypoint.plan import Obstacle, Policy, Situation
from entrypoint.state.awaited import Awaited
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejection, Rejections
from entrypoint.state.reporter import Reporter
from entrypoint.store.base import CheckpointStore, open_store
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import Bounds, Wanted, look

EXEC: Final = Seat()


class Boot(NamedTuple):
    """One boot: what it was told, and where it keeps what must outlive it.

    `status` says what it is at. `umask` is the one it was started with, and vLLM gets; None where
    it was not touched. `seat` is where vLLM will run.
    """

    settings: Settings
    words: tuple[str, ...]
    environ: Mapping[str, str]
    log: Log
    status: Reporter
    umask: int | None = None
    seat: Seat = EXEC

    @property
    def memory(self) -> Memory:
        """Remembered answers."""
        return Memory(self.settings.state_dir)

    @property
    def policy(self) -> Policy:
        """What the operator wants."""
        return Policy(on_miss=self.settings.on_miss, on_failure=self.settings.on_failure)


STORE_SECONDS: Final = 5.0
"""How long a shared store may take for its first answer; a busy one takes seconds."""

FAR: Final = Bounds(manifests=64, seconds=10.0)
"""Of an object store; names tell which checkpoints are worth asking for."""


class Assessment(NamedTuple):
    """What was found out. `resolution` is None when vLLM rejects the words."""

    engine: Executable
    resolution: Resolution | None
    source: SourceView
    local_store: DirectoryStore
    shared_store: CheckpointStore | None
    situation: Situation

    @property
    def key(self) -> Key | None:
        """The wanted key, with the model's identity as far as it is known."""
        if self.resolution is None:
            return None
        return self.resolution.key._replace(model=self.source.identity.ways.get("blake3", ""))


def doubted(boot: Boot, assessment: Assessment, found: Finding) -> Assessment:
    """Return the assessment with a local checkpoint that was doubted after all.

    The shared store, which nobody had to look at, is looked at now.
    """
    situation = assessment.situation._replace(local=found)
    store, resolution = assessment.shared_store, assessment.resolution
    if situation.has_source:
        assessment.source.require_readable()
    if store is not None and resolution is not None and situation.has_source:
        wanted = _wanted(boot.settings, resolution, assessment.source)
        before = assessment.situation.local
        if isinstance(found, Rejected) and isinstance(before, Complete):
            wanted = _rejecting(wanted, before.manifest, found)
        situation = situation._replace(shared=_look_far(store, wanted, boot.memory))
    return assessment._replace(situation=situation)


def look_far(boot: Boot, assessment: Assessment) -> Finding:
    """Look at the shared store again, for what fits this boot."""
    assert assessment.shared_store is not None
    assert assessment.resolution is not None
    wanted = _wanted(boot.settings, assessment.resolution, assessment.source)
    return _look_far(assessment.shared_store, wanted, boot.memory)


def _rejecting(wanted: Wanted, doubted: Manifest, found: Rejected) -> Wanted:
    """Reject the very same also where nobody could keep that, or a plan must not."""

    def rejection(manifest: Manifest) -> Rejection | None:
        if manifest.content == doubted.content:
            return Rejection(found.kind, found.reason)
        return wanted.rejection(manifest)

    return wanted._replace(rejection=rejection)


def assess(boot: Boot) -> Assessment:
    """Find out all that the first decision hangs on, and say what is unusual about this vLLM.

    Changes only memory. Raises: ExecError, EngineError, OwnershipError, ConfigError, StoreError.
    """
    assessment = assess_again(boot)
    if assessment.resolution is not None and (warning := untried(assessment.resolution.key.vllm)):
        boot.log.line("engine.untried", warning)
    return assessment


def _nowhere(words: Sequence[str]) -> str:
    """Say so where the model is a path that leads nowhere: vLLM takes it for a name on the hub."""
    if words and os.path.isabs(words[0]) and not os.path.lexists(words[0]):
        return f"{words[0]} is not there (a container sees only what is mounted); "
    return ""


def assess_again(boot: Boot) -> Assessment:
    """Ask vLLM, look at the source and, as far as needed, at the stores.

    As `assess`, and says nothing but that vLLM is asked, where it has to be.
    """
    settings, memory = boot.settings, boot.memory
    engine = find(settings.vllm, boot.environ)
    local_store = DirectoryStore(settings.local_dir, settings.dir_mode, settings.file_mode)
    shared_store = (
        open_store(settings.shared, dir_mode=settings.dir_mode, file_mode=settings.file_mode)
        if settings.shared
        else None
    )

    def find_stand_in(word: str, commit: str | None) -> StandIn | None:
        stores = _in_turn(local_store, shared_store)
        return stand_in.find(stores, settings.checkpoint, word, commit)

    def asking() -> None:
        boot.log.line("engine.asked", "asking vLLM how it reads the words, some seconds")

    source = SourceView(boot.environ, memory, boot.log, find_stand_in)
    resolved = resolve(
        engine, boot.words, boot.environ, memory, source.identify, source.borrow, asking
    )
    if isinstance(resolved, WordsRefused):
        text = f"{_nowhere(boot.words)}vLLM does not take these words: {resolved.message}"
        wish = Obstacle("engine.rejected", text, exit_code=2, is_wish=True)
        situation = Situation(local=Absent(), shared=Absent(), no_checkpoint=wish)
        resolution = None
    else:
        situation = _situation(settings, resolved, source, local_store, shared_store, memory)
        resolution = resolved
    return Assessment(
        engine=engine,
        resolution=resolution,
        source=source,
        local_store=local_store,
        shared_store=shared_store,
        situation=situation,
    )


def _in_turn(local: DirectoryStore, shared: CheckpointStore | None) -> Iterator[CheckpointStore]:
    yield local
    # Only now: a mount that hangs takes seconds to be known as one.
    if shared is not None:
        yield unwaited(shared)


def _situation(
    settings: Settings,
    resolution: Resolution,
    source: SourceView,
    local_store: DirectoryStore,
    shared_store: CheckpointStore | None,
    memory: Memory,
) -> Situation:
    is_checkpoint = source.here.is_checkpoint
    obstacle = unservable(resolution, source)
    local: Finding = Absent("not looked at")
    shared: Finding = Absent("not configured")
    if obstacle is None and is_checkpoint:
        directory = Path(str(source.here.directory))
        # The checkpoint is its own source: whatever model it holds is the model meant.
        itself = Wanted(
            resolution.key,
            lambda _: True,
            rejections_by(settings, resolution, has_source=False),
            name=directory.name,
            ranks=resolution.ranks,
        )
        local = look(DirectoryStore(directory.parent), itself, memory)
    elif obstacle is None:
        wanted = _wanted(settings, resolution, source)
        if os.path.isdir(settings.local_dir):
            local = look(local_store, wanted, memory)
        else:
            local = Absent(f"{settings.local_dir} is not there yet")
        if shared_store is not None and not isinstance(local, Complete):
            shared = _look_far(shared_store, wanted, memory)
        elif shared_store is not None:
            shared = Absent("not looked at")
    if not is_checkpoint and not isinstance(local, Complete):
        source.require_readable()
    return Situation(
        local=local,
        shared=shared,
        no_checkpoint=obstacle,
        no_copy=unwritable(settings),
        no_save=unsavable(settings, resolution, source),
        no_tee=unteeable(settings, resolution, source.identity),
        has_source=not is_checkpoint,
    )


def _look_far(store: CheckpointStore, wanted: Wanted, memory: Memory) -> Finding:
    """Look at a shared store; where its file system hangs, nothing waits for it."""
    bounds = None if isinstance(store, DirectoryStore) else FAR
    return look(unwaited(store), wanted, memory, bounds)


def unwaited(store: CheckpointStore) -> CheckpointStore:
    """Return a store for one look that ends, whatever becomes of its file system."""
    from entrypoint.store.distant import DistantStore  # noqa: PLC0415 - a hit looks at none

    # The client of object stores has its own bounds.
    return DistantStore.of(store) if isinstance(store, DirectoryStore) else store


def answers(store: CheckpointStore) -> bool:
    """Tell whether a file system answers at all; the client of object stores has its own bounds."""
    if not isinstance(store, DirectoryStore):
        return True
    root = store.root
    return within(STORE_SECONDS, lambda: os.path.isdir(root), at=str(root)) is not None


def _wanted(settings: Settings, resolution: Resolution, source: SourceView) -> Wanted:
    named = settings.checkpoint is not None
    blake3 = source.identity.ways.get("blake3")
    likely = resolution.key._replace(model=blake3).digest[:12] if blake3 else None
    return Wanted(
        resolution.key,
        lambda manifest: source.is_same_model(manifest, named=named),
        rejections_by(settings, resolution),
        name=settings.checkpoint,
        likely=likely,
        model=model_in_name(resolution.model_word),
        ranks=resolution.ranks,
    )


def rejections_by(
    settings: Settings, resolution: Resolution, *, has_source: bool = True
) -> Callable[[Manifest], Rejection | None]:
    """Return how to ask whether a manifest is rejected, or still unproved.

    One whose source's evidence is here is neither: a load proves it before it serves, or serves the
    source, which must be there for that.
    """
    rejections, awaited = Rejections(settings.state_dir), Awaited(settings.state_dir)

    def rejection(manifest: Manifest) -> Rejection | None:
        found = rejections.find(manifest.content, resolution.asked)
        if found or not (needed := unproved(settings, resolution, manifest)):
            return found
        if (
            has_source
            and resolution.nnodes == 1
            and awaited.waits(manifest.content, manifest.layout.ranks)
        ):
            return None
        return Rejection("unproved", f"{needed}: never proved to load to the source's state")

    return rejection
