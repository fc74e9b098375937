"""Noting that the server was told to stop, at once, whatever vLLM makes of it.

While its engine starts, vLLM's server waits for minutes in a call that no signal interrupts, until
whoever sent it sends SIGKILL: no Python code runs in between. A worker cannot tell either: vLLM
ends it when the server is stopped, and just so when another worker died.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from entrypoint.state import stops

STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What boot, too, ends at when it is told."""

LOADER_CONFIG: Final = "--model-loader-extra-config"
"""boot gives it last, in this spelling, followed by a JSON object that names boot and state."""


def note_when_told() -> None:
    """In the process that boot became: from now on a stop leaves a note, and does what it did.

    faulthandler writes from the signal's own handler; what it writes does not matter. The note is
    given up when vLLM sets another handler, as it does when it begins to serve, for all but SIGHUP.
    What is ignored tells nobody to stop. Elsewhere, and without a checkpoint of ours, nothing
    changes.
    """
    settings = loader_settings(sys.argv)
    if settings is None or multiprocessing.parent_process() is not None:
        return
    descriptor = stops.open_note(Path(str(settings["state"])), str(settings["boot"]))
    if descriptor is None:
        return
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            faulthandler.register(number, descriptor, all_threads=False, chain=True)


def note_without_server() -> None:
    """As `note_when_told`, in a process that boot knows to speak no HTTP."""
    settings = loader_settings(sys.argv)
    if settings is not None and settings.get("headless"):
        note_when_told()


def loader_settings(argv: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what boot told our load format, if it is the one to load with."""
    places = [at for at, word in enumerate(argv[:-1]) if word == LOADER_CONFIG]
    if not places:
        return None
    try:
        settings = json.loads(argv[places[-1] + 1])
    except ValueError:
        return None
    ours = isinstance(settings, dict) and {"boot", "state"} <= settings.keys()
    return settings if ours else None
