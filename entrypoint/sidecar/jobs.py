"""What the sidecar changes here: it collects and prefetches, by the code of the commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from entrypoint import compiled, publishing, steps
from entrypoint.caches.collect import collect as collect_caches
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError, LockTimeoutError
from entrypoint.keep import rules_for
from entrypoint.log import human_bytes
from entrypoint.obstacles import unwritable
from entrypoint.sidecar.choice import Fetch, to_fetch
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.node import Node, now
from entrypoint.store import lease, lock, space
from entrypoint.store.base import CheckpointStore
from entrypoint.store.collect import collect as collect_checkpoints
from entrypoint.store.collect import make_room
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import find_by_name
from entrypoint.store.staging import Staging

TURN_SECONDS: Final = 5.0
"""How long to wait for one's turn to copy: boots go first, and the next run is not far."""


def collect(node: Node) -> Iterator[float]:
    """Collect as `shardboot gc` does, where this user may. Raises: StoreError."""
    yield from ()
    settings = node.settings
    if not os.path.isdir(settings.local_dir) or unwritable(settings) is not None:
        return
    state, rules = settings.state_dir, rules_for(settings, shared=False)
    checkpoints = collect_checkpoints(node.local, state, rules, dry_run=False).verdicts
    caches = collect_caches(
        state, settings.local_dir, settings.grace, settings.cache_bytes, dry_run=False
    )
    for gone in (verdict for verdict in (*checkpoints, *caches) if verdict.is_collected):
        text = f"{gone.name}: {human_bytes(gone.size)}; {gone.reason}: {gone.text}"
        node.log.line("collect.gone", text)
        node.metrics.collected_bytes.inc(gone.size)
    if count := sum(verdict.is_collected for verdict in checkpoints):
        node.metrics.collected.inc(count)
        node.look()


def is_alone(node: Node, manifest: Manifest, stack: ExitStack) -> bool:
    """Be the only process of this host that makes it until the block ends, as boots are.

    Where one is at it already, it is left to that one. Raises: StoreError.
    """
    subject = manifest.key.subject(manifest.source.name)
    path = steps.lock_file(node.settings.local_dir, subject)
    try:
        stack.enter_context(lock.exclusive(path, 0.0))
    except LockTimeoutError:
        return False
    return True


def is_our_turn(node: Node, source: CheckpointStore, stack: ExitStack) -> bool:
    """Stand in line until the block ends, where only so many may copy from `source` at once."""
    most = node.settings.shared_readers
    if not most or not isinstance(source, DirectoryStore):
        return True
    line = lease.queue(source.root, "readers", source.dir_mode, source.file_mode)
    return stack.enter_context(line).wait(most, TURN_SECONDS).how != "late"


def have_room(
    node: Node, staging: Staging, entries: Sequence[FileEntry], spared: str | None = None
) -> None:
    """Have room for a copy into `staging`, by evicting others than `spared` if it must be.

    Nobody has asked for it yet, so nothing goes that `gc` would keep. Raises: as `make_room`.
    """
    settings = node.settings
    taken, most = staging.room_taken(entries), settings.max_bytes
    make_room(
        node.local,
        settings.state_dir,
        sum(entry.size for entry in entries) - taken,
        space.Limits(settings.reserve_bytes, most - taken if most is not None else None),
        spared,
        lambda text: node.log.line("space.evicted", text),
        staging.path,
        rules_for(settings, shared=False),
    )


class Prefetch:
    """The job that copies what is newer in the shared store than all that is here."""

    def __init__(self, node: Node) -> None:
        self._node, self._fetched = node, Done(node.boot.memory, "prefetched")
        self.later = Later()
        self._since: dict[str, float] = {}

    def run(self) -> Iterator[float]:
        """Copy all that is wanted, where this user may.

        Raises: as `publishing.transport`; SpaceError; StoreError.
        """
        node = self._node
        wanted = self._wanted()
        if node.shared is None or not wanted or unwritable(node.settings) is not None:
            return
        yield from in_turn(wanted, lambda each: each.content, self._fetch, self.later)
        node.look()
        self._wanted()

    def _wanted(self) -> list[Fetch]:
        node, settings = self._node, self._node.settings
        there = node.seen("shared")
        fetched = {each.content for each in there if self._fetched.when(each.content)}
        wanted = to_fetch(node.seen("local"), there, fetched, settings.prove)
        # Since it was seen to wait: of two hosts' clocks nobody knows which is right.
        since = {each.content: self._since.get(each.content, now()) for each in wanted}
        self._since = since
        lagging = min(since.values(), default=0.0)
        node.sight = node.sight._replace(waiting=len(wanted), lagging=lagging)
        return wanted

    def _fetch(self, wanted: Fetch) -> None:
        """Copy one checkpoint, if it is our turn; it is verified on the way, as by `pull`."""
        node, source = self._node, self._node.shared
        if source is None:
            return
        manifest = find_by_name(source, wanted.name)
        with ExitStack() as stack:
            if manifest.content != wanted.content or not is_alone(node, manifest, stack):
                return
            if not is_our_turn(node, source, stack):
                return
            node.look()
            if wanted not in self._wanted():
                # A boot has made it meanwhile.
                return
            size = manifest.size_for(wanted.ranks)
            node.log.line("prefetch", f"{wanted.name}: {human_bytes(size)} from {source.where}")
            part = manifest.part(wanted.ranks)
            staging = stack.enter_context(node.local.stage(manifest.name, part))
            have_room(node, staging, manifest.files_for(wanted.ranks))
            try:
                made = publishing.transport(
                    *(node.boot, source, staging, manifest, wanted.ranks),
                    *("copy", node.local.where),
                )
            except DamagedError:
                # To read all of it again would find the same again.
                self._fetched.put_off(manifest.content, now())
                raise
        compiled.fetch(node.boot, source, node.local.path(made.name), manifest)
        self._fetched.note(manifest.content, now())
        self.later.forget(manifest.content)
        node.metrics.prefetched.inc()
        node.metrics.prefetched_bytes.inc(size)
