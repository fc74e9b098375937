"""Repairing what is damaged here, with what the shared store has of the very same checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.finding import Damaged
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError
from entrypoint.log import human_bytes
from entrypoint.obstacles import unwritable
from entrypoint.progress import Progress
from entrypoint.sidecar import choice
from entrypoint.sidecar.choice import Past, to_repair
from entrypoint.sidecar.copying import have_room, is_alone, is_our_turn
from entrypoint.sidecar.done import Done
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.node import Node, now
from entrypoint.store import lock, transfer
from entrypoint.store.look import find_by_name
from entrypoint.store.salvage import can_link, salvage
from entrypoint.store.staging import Staging


class Repair:
    """The job that makes damaged checkpoints whole: only what is bad of them is copied.

    The repaired one takes the place of the damaged one in one step, and no file is changed: who
    serves it goes on with what it has, under the same lock.
    """

    def __init__(self, node: Node) -> None:
        self._node, self._repaired = node, Done(node.boot.memory, "repaired")
        self.later = Later()

    def run(self) -> Iterator[float]:
        """Repair all that can be, where this user may.

        Raises: DamagedError where the shared store's is damaged, too; SpaceError; StoreError;
        NotFoundError; StagingError.
        """
        node, wanted = self._node, self._wanted()
        if node.shared is None or not wanted or unwritable(node.settings) is not None:
            return
        yield from in_turn(wanted, lambda each: each.content, self._repair, self.later)
        node.look()

    def _wanted(self) -> list[choice.Mending]:
        node = self._node
        here = node.seen("local")
        times = {each.content: self._repaired.when(each.content) for each in here if each.content}
        repaired = {content: time for content, time in times.items() if time}
        past = Past(repaired, now(), node.settings.scrub_interval)
        return to_repair(here, node.seen("shared"), past)

    def _repair(self, wanted: choice.Mending) -> None:
        """Repair one checkpoint, if it is our turn."""
        node, source = self._node, self._node.shared
        if source is None:
            return
        manifest = find_by_name(node.local, wanted.name)
        with ExitStack() as stack:
            if manifest.content != wanted.content or not is_alone(node, manifest, stack):
                return
            if not is_our_turn(node, source, stack):
                return
            found = node.local.check(manifest, node.boot.memory, ())
            if not isinstance(found, Damaged):
                # A boot has made it anew meanwhile.
                return
            ranks = node.local.ranks(manifest)
            entries, size = manifest.files_for(ranks), manifest.size_for(ranks)
            staging = stack.enter_context(node.local.stage(manifest.name, manifest.part(ranks)))
            if not self._take_over(staging, manifest, entries, found.discrepancies):
                return
            have_room(node, staging, entries, wanted.name)
            try:
                with Progress(
                    node.log, node.boot.status, "repair", size, staging.held_bytes
                ) as progress:
                    fetched = transfer.copy(
                        *(source, wanted.there, manifest, entries, staging),
                        on_bytes=progress.add,
                    )
            except DamagedError:
                # To read all of it again would find the same again.
                self._repaired.put_off(manifest.content, now())
                raise
            staging.commit(manifest, ranks, repairs=True)
        text = f"{human_bytes(fetched)} of {human_bytes(size)} came from {source.where}"
        node.log.line("repair.done", f"{manifest.name}: {text}")
        self._repaired.note(manifest.content, now())
        self.later.forget(manifest.content)
        node.metrics.repaired.inc()
        node.metrics.repaired_bytes.inc(fetched)

    def _take_over(
        self,
        staging: Staging,
        manifest: Manifest,
        entries: Collection[FileEntry],
        wrong: Collection[str],
    ) -> bool:
        """Take what seems sound into `staging`; False where a server would lose its lock."""
        node, directory = self._node, self._node.local.path(manifest.name)
        if can_link(staging, directory):
            # What the disk has may be damaged, and what the page cache has right.
            bad = {each.path for each in entries if _names(wrong, directory, each.path)}
            salvage(staging, directory, [each for each in entries if each.path not in bad])
        elif not lock.is_free(directory):
            seconds = self.later.put_off(manifest.content)
            text = "in use, and files cannot be linked here"
            node.log.line("repair.waits", f"{manifest.name}: {text}; again in {seconds:.0f} s")
            return False
        return True


def _names(wrong: Collection[str], directory: Path, path: str) -> bool:
    beginnings = (f"{path}:", f"{directory}/{path}:")
    return any(text.startswith(beginnings) for text in wrong)
