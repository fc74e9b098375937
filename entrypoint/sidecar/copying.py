"""What comes before the sidecar copies: nobody else is at it, it is its turn, and there is room."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from entrypoint import steps
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import LockTimeoutError
from entrypoint.keep import rules_for
from entrypoint.sidecar.node import Node
from entrypoint.store import lease, lock, space
from entrypoint.store.base import CheckpointStore
from entrypoint.store.collect import make_room
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.staging import Staging

TURN_SECONDS: Final = 5.0
"""How long to wait for one's turn to copy: boots go first, and the next run is not far."""


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
