"""Reading every byte of the local checkpoints, one after the other, at a bounded rate."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.inspect import examine
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ShardbootError
from entrypoint.sidecar.choice import to_scrub
from entrypoint.sidecar.done import Done, gone_by
from entrypoint.sidecar.node import Node, now
from entrypoint.sidecar.view import COMPLETE
from entrypoint.store.look import find_by_name, remember_look

PIECE_BYTES: Final = 4 * 1024 * 1024
"""One read: a disk is not kept for longer by it than a server would notice."""


class Scrub:
    """The job that looks for bytes that are not what they were."""

    def __init__(self, node: Node, on_damage: Callable[[], None] = lambda: None) -> None:
        self._node, self._scrubbed = node, Done(node.boot.memory, "scrubbed")
        self._failed: dict[str, float] = {}
        self._on_damage, self._asked = on_damage, 0.0

    def ask(self) -> None:
        """Have all read that was read before this moment, whatever the interval."""
        self._asked = now()

    def run(self) -> Iterator[float]:
        """Read one checkpoint in full: whose last scrub is longest ago, if that is due.

        Damage is remembered: it is repaired, or boots copy or save it anew. What cannot be read is
        not, since it may be later. Raises: OSError naming the file; StoreError; NotFoundError;
        ManifestError.
        """
        node = self._node
        here = node.seen("local")
        times = {
            each.digest: max(
                self._scrubbed.when(each.digest), gone_by(self._failed.get(each.digest, 0.0))
            )
            for each in here
            if each.digest
        }
        began = now()
        interval = min(node.settings.scrub_interval, began - gone_by(self._asked))
        chosen = to_scrub(here, times, began, interval)
        if chosen is not None:
            try:
                yield from self._read(find_by_name(node.local, chosen.name))
            except (ShardbootError, OSError):
                # Who cannot be read must not keep the others from their turn.
                self._failed[chosen.digest] = now()
                raise
            self._scrubbed.note(chosen.digest, now())
        sound = [self._scrubbed.when(each.digest) for each in here if each.state == COMPLETE]
        node.sight = node.sight._replace(scrubbed=min(sound, default=None))

    def _read(self, manifest: Manifest) -> Iterator[float]:
        node = self._node
        directory, ranks = node.local.path(manifest.name), node.local.ranks(manifest)
        on_bytes, rate = node.metrics.scrubbed_bytes.inc, node.settings.scrub_rate
        try:
            wrong = yield from read_through(directory, manifest, ranks, rate, on_bytes)
        except FileNotFoundError:
            # Collected meanwhile; if not, the next look will tell.
            return
        if not wrong:
            node.log.line("scrub.done", f"{manifest.name}: every byte is what it was")
            return
        node.metrics.damaged.inc()
        remember_look(directory, manifest, wrong, node.boot.memory)
        text = f"{manifest.name}: {wrong[0]}"
        node.log.line("scrub.damaged", f"{text}; no boot serves it until it is repaired")
        node.look()
        self._on_damage()


def read_through(
    directory: Path,
    manifest: Manifest,
    ranks: Collection[int],
    rate: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Generator[float, None, tuple[str, ...]]:
    """Compare every byte for `ranks` with the manifest; return discrepancies, in words.

    Yields after each piece how long to rest, so that it is no more than `rate` bytes a second.
    Raises: OSError naming the file.
    """
    shallow = examine(directory, manifest, ranks, known={})
    if shallow.discrepancies:
        return shallow.discrepancies
    wrong: list[str] = []
    for entry in manifest.files_for(ranks):
        hasher, began = blake3(), time.monotonic()
        try:
            for piece in _pieces(f"{directory}/{entry.path}", entry):
                hasher.update(piece)
                on_bytes(len(piece))
                yield max(0.0, len(piece) / rate - (time.monotonic() - began))
                began = time.monotonic()
        except OSError as error:
            path = f"{directory}/{entry.path}"
            raise OSError(error.errno, error.strerror, path) from error
        if str(hasher.hexdigest()) != entry.blake3:
            wrong.append(f"{entry.path}: BLAKE3 is not the one in the manifest")
    return tuple(wrong)


def _pieces(path: str, entry: FileEntry) -> Iterator[memoryview]:
    """Yield a file as the disk has it, past the page cache: that stays as servers have left it.

    Where the file system knows no such reads, as they come.
    """
    # Pages, since a read past the cache wants its memory aligned.
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _set_direct(descriptor, wanted=True)
        offset = 0
        while offset < entry.size and (count := _read(descriptor, buffer, offset)):
            yield buffer[:count]
            offset += count
    finally:
        os.close(descriptor)


def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
    try:
        return os.preadv(descriptor, [buffer], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _set_direct(descriptor, wanted=False)
    return os.preadv(descriptor, [buffer], offset)


def _set_direct(descriptor: int, *, wanted: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
