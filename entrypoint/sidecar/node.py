"""What the jobs work on: this node's stores, its state, and what was seen of them last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from entrypoint.assess import STORE_SECONDS, Boot, answers
from entrypoint.config import Settings
from entrypoint.errors import ShardbootError, StoreError
from entrypoint.health.check import check_shown
from entrypoint.log import Log
from entrypoint.sidecar.history import History
from entrypoint.sidecar.metrics import Metrics, Sight
from entrypoint.sidecar.view import Manifests, Seen, StoreView, see_local, see_shared
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address
from entrypoint.store.base import CheckpointStore, open_store
from entrypoint.store.directory import DirectoryStore

ASK_SECONDS: Final = 2.0
"""How long a server may take to say that it serves; everything else waits for it."""


class Node:
    """One node, as its sidecar knows it. Raises: ConfigError for a shared store that is none."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], log: Log) -> None:
        self.settings, self.log, self.metrics = settings, log, Metrics()
        modes = {"dir_mode": settings.dir_mode, "file_mode": settings.file_mode}
        self.local = DirectoryStore(settings.local_dir, **modes, begins_absent=True)
        self.shared: CheckpointStore | None = None
        if settings.shared:
            self.shared = open_store(settings.shared, **modes)
        # The steps of a boot are ours as well; only that nothing boots here, and no status is kept.
        self.boot = Boot(settings, (), environ, log, Reporter(None, log.boot, Address()))
        self.sight = Sight()
        # Before and not after: what comes in between is seen, or told of.
        self.before_looking_far: Callable[[], None] = lambda: None
        self._history = History(settings.state_dir)
        self._manifests = Manifests(self.local)
        self._shared_manifests = Manifests(self.shared, is_far=True) if self.shared else None

    def look(self) -> tuple[float, ...]:
        """Look at the boots of this node, and at its store. Raises: StoreError."""
        root = self.settings.state_dir
        boots = tuple(check_shown(root, ASK_SECONDS))
        self.sight = self.sight._replace(boots=boots, free=_free(self.settings.local_dir))
        try:
            told = self._history.told()
            view = see_local(self.local, self._manifests, self.boot.memory, told.uses)
        except StoreError as error:
            self._see("local", StoreView(self.local.where, error=str(error)))
            raise
        self.sight = self.sight._replace(told=told)
        self._see("local", view)
        return ()

    def look_far(self) -> tuple[float, ...]:
        """Look at the shared store, unless its file system hangs. Raises: StoreError."""
        store, manifests = self.shared, self._shared_manifests
        if store is None or manifests is None:
            return ()
        try:
            if not answers(store):
                raise StoreError(f"{store.where} did not answer within {STORE_SECONDS:.0f} s")
            self.before_looking_far()
            self._see("shared", see_shared(store, manifests, self.boot.memory))
        except (ShardbootError, OSError) as error:
            self._see("shared", StoreView(store.where, error=str(error)))
            raise
        return ()

    def _see(self, store: str, view: StoreView) -> None:
        self.sight = self.sight._replace(stores=self.sight.stores | {store: view})

    def seen(self, store: str) -> tuple[Seen, ...]:
        """Return the checkpoints of a store as they were last seen; none where it was not."""
        view = self.sight.stores.get(store)
        return view.seen if view else ()


def _free(directory: Path) -> int | None:
    # Here and not where it is asked for: the mount may be dead, and HTTP waits for nobody.
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def now() -> float:
    """Return the time, as files remember it."""
    return round(time.time(), 3)
