"""Copying what the shared store has that is newer than all here, by the code of `pull`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from entrypoint import compiled, publishing
from entrypoint.assess import unwaited
from entrypoint.errors import DamagedError
from entrypoint.log import human_bytes
from entrypoint.obstacles import unwritable
from entrypoint.sidecar.choice import Fetch, to_fetch
from entrypoint.sidecar.copying import have_room, is_alone, is_our_turn
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.node import Node, now
from entrypoint.store.look import find_by_name


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
        fetched = {each.content for each in there if self._fetched.ever(each.content)}
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
        manifest = find_by_name(unwaited(source), wanted.name)
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
