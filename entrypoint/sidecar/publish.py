"""Publishing what this host has saved: of all that could, one host at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

from entrypoint import publishing
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.obstacles import unwritable
from entrypoint.sidecar.choice import to_publish
from entrypoint.sidecar.copying import TURN_SECONDS, is_alone
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.node import Node, now
from entrypoint.sidecar.view import Seen
from entrypoint.store import lease
from entrypoint.store.base import CheckpointStore
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import find_by_name


class Publish:
    """The job that pushes what this host has saved, and the shared store lacks."""

    def __init__(self, node: Node) -> None:
        self._node, self._published = node, Done(node.boot.memory, "published")
        self.later = Later()

    def run(self) -> Iterator[float]:
        """Push all that may be served, and that nobody else is at. Raises: as `publish`."""
        yield from in_turn(self._wanted(), lambda each: each.key, self._publish, self.later)

    def _wanted(self) -> list[Seen]:
        node = self._node
        view = node.sight.stores.get("shared")
        if view is None or view.error:
            return []
        here = node.seen("local")
        published = {each.content for each in here if self._published.ever(each.content)}
        return to_publish(here, view.seen, os.uname().nodename, published)

    def _publish(self, wanted: Seen) -> None:
        """Push one checkpoint when it is our turn, unless there is one of its key by then."""
        node = self._node
        if node.shared is None:
            return
        manifest = find_by_name(node.local, wanted.name)
        with ExitStack() as stack:
            if who := self._who_is_ahead(node.shared, manifest, stack):
                seconds = self.later.put_off(wanted.key)
                text = f"{wanted.name}: {who}; the next look is in {seconds:.0f} s"
                node.log.line("publish.waits", text)
                return
            node.look_far()
            if wanted not in self._wanted():
                self.later.forget(wanted.key)
                return
            publishing.publish(node.boot, node.local, node.shared, manifest)
        self.later.forget(wanted.key)
        self._published.note(wanted.content, now())
        node.metrics.published.inc()
        node.metrics.published_bytes.inc(manifest.size)

    def _who_is_ahead(self, target: CheckpointStore, manifest: Manifest, stack: ExitStack) -> str:
        """Stand in line until the block ends; return who is at the same key, "" for nobody.

        A boot of this host pushes its save by itself; one of another host never waits for us,
        since what it saves may be another model by the same words. Raises: StoreError.
        """
        # Who may not write here can hold no lock either.
        with ExitStack() as briefly:
            may_write = unwritable(self._node.settings) is None
            if may_write and not is_alone(self._node, manifest, briefly):
                return "a boot of this host is at it"
        if not isinstance(target, DirectoryStore):
            return ""
        said: list[str] = []
        what = f"publish-{manifest.key.digest[:16]}"
        line = lease.queue(target.root, what, target.dir_mode, target.file_mode)
        ticket = stack.enter_context(line)
        waited: lease.Waited[None] = ticket.wait(1, TURN_SECONDS, on_wait=said.append)
        return " ".join(["another host is at it", *said]) if waited.how == "late" else ""
