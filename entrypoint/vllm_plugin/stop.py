"""Noting that the server was told to stop, before vLLM does anything about it.

A worker cannot tell: while it loads, vLLM ends it when the server is stopped, and just so when
another worker died.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

LOADER_CONFIG: Final = "--model-loader-extra-config"
"""boot gives it last, in this spelling, followed by a JSON object that names boot and state."""


def note_when_told() -> None:
    """In the process that boot became: from now on SIGTERM leaves a line in the ledger.

    Then it does what it did before. Elsewhere, and without a checkpoint of ours, nothing changes.
    """
    settings = loader_settings(sys.argv)
    if settings is None or multiprocessing.parent_process() is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or isinstance(getattr(before, "__self__", None), _Noting):
        return
    signal.signal(signal.SIGTERM, _Noting(settings, before).hear)


def loader_settings(argv: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what boot told our load format, if it is the one to load with."""
    places = [at for at, word in enumerate(argv[:-1]) if word == LOADER_CONFIG]
    if not places:
        return None
    try:
        settings = json.loads(argv[places[-1] + 1])
    except ValueError:
        return None
    ours = isinstance(settings, dict) and {"manifest", "boot", "state"} <= settings.keys()
    return settings if ours else None


class _Noting:
    def __init__(self, settings: Mapping[str, Any], before: Any) -> None:
        self.settings, self.before, self.pid = settings, before, os.getpid()

    def hear(self, number: int, frame: FrameType | None) -> None:
        from entrypoint.vllm_plugin.notes import Notes

        # A fork has this handler until it sets its own.
        if os.getpid() == self.pid:
            Notes.of(self.settings).line("stopped")
        if callable(self.before):
            self.before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
