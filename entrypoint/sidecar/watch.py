"""Hints from the kernel that the shared store has changed: each is worth a look, none is the truth.

Only where the kernel knows of all who write there. On network and FUSE file systems it tells of
this host alone: there a look at its interval is all there is. watchdog, which this is built on, is
an extra, so nothing else may import this module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from entrypoint.insight import mount
from entrypoint.sidecar.threads import without_signals

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

TOLD_OF: Final = ("disk", "memory", "layer")
"""Classes of file systems whose every change goes through this kernel."""

PROBE_SECONDS: Final = 3.0
LEAVE_SECONDS: Final = 1.0
_NEWS: Final = ("created", "moved", "deleted")


class Watch:
    """Sets `hint` whenever a name comes to, or goes from, the top of the store at `root`."""

    def __init__(self, root: Path, hint: threading.Event, say: Callable[[str], None]) -> None:
        self._root, self._hint, self._say = root, hint, say
        self._observer: BaseObserver | None = None
        self._place: tuple[int, int] | None = None
        self._said = ""

    def renew(self) -> None:
        """Watch what lies at the root now; to be called before every look. May hang as its mount.

        Something else may have been mounted there, or what was watched may have gone. `say` hears,
        whenever that changes, one line: what tells of news there.
        """
        place = _place(self._root)
        if place == self._place and (self._observer is None or _is_alive(self._observer)):
            return
        self.close()
        self._place = place
        if place is None:
            return
        obstacle = self._begin()
        text = f"only looks tell of news: {obstacle}" if obstacle else "news come at once"
        if text != self._said:
            self._said = text
            self._say(f"{self._root}: {text}")

    def close(self) -> None:
        """Watch no more."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            if observer.ident is not None:
                observer.join(LEAVE_SECONDS)

    def _begin(self) -> str:
        """Watch, if that tells the truth; return why it does not, or ""."""
        try:
            found = mount.look(self._root)
            if found.place not in TOLD_OF:
                return f"of what others do on {found.kind} no kernel tells"
            ear = _Ear(self._hint)
            # Its threads are begun by its making already.
            with without_signals():
                self._observer = Observer()
                self._observer.schedule(ear, str(self._root))
                self._observer.start()
        except (OSError, RuntimeError) as error:
            # Among others where all watches of this user are taken (inotify_add_watch(2)), or all
            # the threads that it may have.
            self.close()
            return str(getattr(error, "strerror", None) or error)
        # What a kernel takes it may still never tell of, as one in a sandbox.
        if not _touch(self._root) or ear.heard.wait(PROBE_SECONDS):
            return ""
        self.close()
        return f"nothing was told of a change within {PROBE_SECONDS:.0f} s"


class _Ear(FileSystemEventHandler):
    """Hears of the top of a store; names with a dot are its own business."""

    def __init__(self, hint: threading.Event) -> None:
        self.heard = threading.Event()
        self._hint = hint

    def on_any_event(self, event: FileSystemEvent) -> None:
        self.heard.set()
        names = (os.fsdecode(path) for path in (event.src_path, event.dest_path) if path)
        is_name = any(not os.path.basename(name).startswith(".") for name in names)
        if event.event_type in _NEWS and is_name:
            self._hint.set()


def _place(root: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(root)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _touch(root: Path) -> bool:
    with suppress(OSError):
        os.utime(root)
        return True
    return False


def _is_alive(observer: BaseObserver) -> bool:
    """Tell whether it still watches: what was deleted it watches no more."""
    return observer.is_alive() and all(emitter.is_alive() for emitter in observer.emitters)
